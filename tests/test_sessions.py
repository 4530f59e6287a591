"""What is kept between calls: remembered once, given up in the order of use, safe between threads."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

import tnsim
from tnsim import Session, session, using
from tnsim.sessions import LRUCache, session_cache


def test_what_was_used_longest_ago_is_given_up():
    kept = LRUCache(limit=2)
    made = []

    def make(key):
        return kept.get(key, lambda: made.append(key) or key)

    for key in "abacb":
        assert make(key) == key
    assert made == ["a", "b", "c", "b"]  # b left when c came, because a had been asked for again
    assert len(kept) == 2 and "c" in kept and "a" not in kept
    kept.clear()
    assert len(kept) == kept.held == 0


def test_a_value_larger_than_the_limit_is_kept_alone():
    kept = LRUCache(limit=3, size=len)
    for word in ("ab", "c", "longer"):
        kept.get(word, lambda word=word: word)
    assert "longer" in kept and (len(kept), kept.held) == (1, 6)


def test_some_keys_are_forgotten_and_others_stay():
    kept = LRUCache(limit=100, size=len)
    for word in ("a1", "a22", "b333", "a4444"):
        kept.get(word, lambda word=word: word)
    kept.shrink(5, 1, lambda key: key[0] == "a")  # the last one, and what fits beside it: nothing
    assert "a4444" in kept and "b333" in kept and (len(kept), kept.held) == (2, 9)
    kept.forget(lambda key: key[0] == "a")
    assert "b333" in kept and (len(kept), kept.held) == (1, 4)


def test_results_belong_to_the_session_in_use():
    calls = []

    @session_cache
    def double(x):
        calls.append(x)
        return 2 * x

    assert double(3) == double(3) == 6 and calls == [3]
    with using(Session()) as other:
        assert double(3) == 6 and calls == [3, 3] and len(other.results) == 1
        assert session() is other
    session().clear()
    assert double(3) == 6 and calls == [3, 3, 3]


def test_an_error_is_not_remembered():
    @session_cache
    def fails(x):
        raise ValueError(x)

    for _ in range(2):
        with pytest.raises(ValueError, match="7"):
            fails(7)


def test_threads_share_one_value():
    kept = LRUCache(limit=8)
    together, results = threading.Barrier(8), []

    def ask(n):
        together.wait()
        for key in range(200):
            results.append((key, kept.get(key % 12, object)))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(ask, range(8)))
    assert len(results) == 1600 and len(kept) == kept.held == 8


def test_threads_compute_the_same_similarity(rng):
    shape = (4, 3), (4, 3), (2, 4)
    models = [tnsim.Model([tnsim.Bilinear(*(rng.normal(size=s) for s in shape))]) for _ in range(6)]
    expected = [float(tnsim.similarity(models[0], model)) for model in models]
    tnsim.session().clear()
    with ThreadPoolExecutor(6) as pool:
        found = pool.map(lambda model: float(tnsim.similarity(models[0], model)), models)
        assert list(found) == expected


def test_a_session_says_its_limits():
    said = (
        "Session(results=3, operations=16384, block_bytes=5, device_bytes=4294967296, tier='auto')"
    )
    assert repr(Session(results=3, block_bytes=5)) == said
