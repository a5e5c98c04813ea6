"""The kit that every strategy passes: ranks to run on, and the tests to run on them."""
