"""Being a package with a conftest, `tests` has pytest put the repository root on sys.path (for `tests.reference`)."""
