"""Ranks to run functions on: processes that are started once and serve many tests."""
