"""The tests of every distribution here use the ranks that Polyshard's kit offers."""

pytest_plugins = ["polyshard.conformance.pytest_plugin"]
