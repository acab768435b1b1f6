"""Tests against a checkout of NeMo-RL, in an environment of their own: `ci/regression.sh` runs them, nothing else does.

They need `NEMO_RL_UPSTREAM`, the patched checkout, which is on the path too.
"""

import os

import pytest

collect_ignore_glob = [] if os.environ.get("NEMO_RL_UPSTREAM") else ["test_*.py"]


def pytest_configure(config):
    """Says what is missing where these tests were asked for by name; a run of everything leaves them out."""
    asked = [argument for argument in config.args if "upstream" in argument]
    if asked and collect_ignore_glob:
        raise pytest.UsageError(
            f"{asked[0]} needs NEMO_RL_UPSTREAM, a patched checkout of NeMo-RL, on the path too, with what it imports; run "
            "bash ci/regression.sh, which makes and sets all of it"
        )


if os.environ.get("NEMO_RL_UPSTREAM"):
    from tests.distributed.conftest import RankPool, _context

    # Importing upstream takes a rank half a minute; forked from a server that has it, none.
    _context.set_forkserver_preload(["tests.upstream.worker"])

    @pytest.fixture(scope="session")
    def ranks(tmp_path_factory):
        """`ranks(world_size)` is the pool of that many ranks, started once."""
        pools: dict[int, RankPool] = {}

        def pool(world_size: int) -> RankPool:
            if world_size not in pools:
                pools[world_size] = RankPool(world_size, 120.0, tmp_path_factory.mktemp("ranks"))
            return pools[world_size]

        yield pool
        for one in pools.values():
            one.stop()

    @pytest.fixture(scope="session")
    def folders(tmp_path_factory):
        """A tiny policy's folder and that of an EAGLE-3 draft for it."""
        from tests.upstream.folders import draft_folder, policy_folder

        root = tmp_path_factory.mktemp("models")
        return policy_folder(root / "policy"), draft_folder(root / "draft")
