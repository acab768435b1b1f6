"""The monitor's news, between threads of one process; deaths of real processes are in tests/distributed."""

import socket
import threading
import time

import pytest

from nemo_ext.taps.errors import StageLost
from nemo_ext.taps.monitor import Monitor

NAMES = ["stage 0 (a)", "stage 1 (b)", "stage 2 (c)"]


@pytest.fixture
def monitors():
    """Three connected monitors, the last stage's last; `stuck` gets what `on_stuck` was called with."""
    stuck = []
    made = [Monitor(stage, NAMES, on_stuck=stuck.append, grace_s=0.2) for stage in range(3)]
    listener, door = Monitor.listen(outside=False, token="secret")
    joins = [threading.Thread(target=one.join, args=(door,)) for one in made[:2]]
    for join in joins:
        join.start()
    made[2].gather(listener, door.token, 2)
    for join in joins:
        join.join()
    yield made, stuck
    for one in made:
        one.close()


def test_a_quiet_pipeline_has_no_news(monitors):
    made, _ = monitors
    assert [one.wait_for_news(0.05) for one in made] == [None, None, None]


def test_leaving_is_no_loss(monitors):
    made, _ = monitors
    made[0].close()
    assert made[2].wait_for_news(0.3) is None and made[1].wait_for_news(0.01) is None


def test_a_failure_is_known_everywhere(monitors):
    made, _ = monitors
    made[0].fail("ValueError: x")
    for one in made[1:]:
        assert str(one.wait_for_news(2.0)) == "stage 0 (a) failed: ValueError: x"
    assert made[0].lost is None
    with pytest.raises(StageLost, match="stage 0"):
        made[1].busy(True)


def test_news_are_passed_on_before_their_reader_leaves(monitors, monkeypatch):
    made, _ = monitors
    tell = made[2]._tell

    def tell_late(message, but=None):
        if "why" in message:
            time.sleep(0.2)
        tell(message, but)

    monkeypatch.setattr(made[2], "_tell", tell_late)
    made[0].fail("x")
    assert made[2].wait_for_news(2.0) is not None
    made[2].close()
    assert str(made[1].wait_for_news(2.0)) == "stage 0 (a) failed: x"


@pytest.mark.parametrize("dead", [1, 2])
def test_a_dead_connection_is_known_everywhere(monitors, monkeypatch, dead):
    made, _ = monitors
    monkeypatch.setattr(made[dead], "_learn", lambda *_: None)  # the dead say nothing
    for peer in list(made[dead]._peers):
        peer.shutdown(socket.SHUT_RDWR)
    for stage, one in enumerate(made):
        if stage != dead:
            assert str(one.wait_for_news(2.0)) == f"{NAMES[dead]} is gone: its process or host died"


def test_only_a_stage_that_stays_in_its_step_is_stuck(monitors):
    made, stuck = monitors
    made[1].busy(True)
    made[2].busy(True)
    made[0].fail("x")
    assert made[2].wait_for_news(2.0) is not None
    made[2].busy(False)
    time.sleep(0.6)
    assert [str(one) for one in stuck] == ["stage 0 (a) failed: x"]


def test_a_stage_that_does_not_come_is_named(monkeypatch):
    monkeypatch.setattr("nemo_ext.taps.monitor._CONNECT_S", 0.2)
    last = Monitor(2, NAMES)
    listener, door = Monitor.listen(outside=False, token="secret")
    stranger = socket.create_connection((door.host, door.port))
    stranger.sendall(b"guess 0\n")
    with pytest.raises(StageLost, match=r"stage 0 \(a\), stage 1 \(b\) did not connect"):
        last.gather(listener, door.token, 2)
    stranger.close()
    last.close()
