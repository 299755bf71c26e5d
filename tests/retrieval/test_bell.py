"""Calls through pipes: answered in order, refused rather than waited for, and never left open."""

import threading
from concurrent.futures import Future

import pytest

from ucm_ray.retrieval.bell import Bell, serve


def ring(bell: Bell, *args) -> Future:
    future: Future = Future()

    def done(result):
        future.set_exception(result) if isinstance(result, Exception) else future.set_result(result)

    if not bell.ring(args, done):
        raise BlockingIOError
    return future


@pytest.fixture
def connect():
    bells = []

    def start(call) -> Bell:
        bells.append(Bell())
        accepted = serve(bells[-1].invitation, call)
        assert accepted
        bells[-1].accepted(accepted)
        return bells[-1]

    yield start
    for bell in bells:
        bell.close()


def test_calls_are_answered_in_order_and_errors_come_back(connect):
    bell = connect(lambda x: 10 / x)
    calls = [ring(bell, x) for x in (1, 2, 0, 5)]
    assert [call.result(10) for call in (*calls[:2], calls[3])] == [[10.0], [5.0], [2.0]]
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        calls[2].result(10)


def test_a_large_answer_passes_and_a_large_call_is_refused(connect):
    bell = connect(lambda size: bytes(size))
    assert len(ring(bell, 10**6).result(10)[0]) == 10**6
    with pytest.raises(BlockingIOError):
        ring(bell, bytes(5000))


def test_a_shard_that_hangs_never_holds_up_the_caller(connect):
    gate = threading.Event()
    bell = connect(lambda _: gate.wait(30))
    calls = []
    with pytest.raises(BlockingIOError):
        for _ in range(10**5):
            calls.append(ring(bell, bytes(1000)))
    gate.set()
    assert all(call.result(30) == [True] for call in calls)


def test_what_was_called_before_hanging_up_is_still_answered(connect):
    gate = threading.Event()
    bell = connect(lambda: gate.wait(30))
    call = ring(bell)
    bell.close()
    with pytest.raises(BlockingIOError):
        ring(bell)
    gate.set()
    assert call.result(10) == [True]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_when_the_shard_ends_its_calls_fail(connect):
    def end():
        raise SystemExit  # ends the shard's thread, and with it its ends of the pipes

    bell = connect(end)
    with pytest.raises(ConnectionError):
        ring(bell).result(10)
    with pytest.raises(BlockingIOError):
        ring(bell)


def test_pipes_that_cannot_be_opened_are_not_served(tmp_path):
    bell = Bell()
    assert not serve((str(tmp_path / "none"), bell.invitation[1]), print)
    file = tmp_path / "file"
    file.write_text("kept")
    assert not serve((bell.invitation[0], str(file)), print) and file.read_text() == "kept"
    bell.accepted(False)
    with pytest.raises(BlockingIOError):
        ring(bell)
