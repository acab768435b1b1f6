"""Patches on checkouts that are at no pinned commit: where they go, and whether everything that they count on is there.

Upstream's files are parsed and never imported, so that a bare checkout is enough.
"""
