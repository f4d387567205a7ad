"""Block accounting against a brute-force twin, and the order in which cached blocks are evicted."""

from invariants import check_pool

from kvrelay.paged_engine.blocks import BlockPool
from kvrelay.wire.kv_events import ROOT, chain, extend, root_of


def _hashes(count: int, salt: int = 0) -> list[bytes]:
    out: list[bytes] = []
    extend(out, [salt * 1000 + i for i in range(16 * count)], 16)
    return out


def test_a_published_block_is_found_until_it_is_reused():
    pool = BlockPool(4)
    hashes = _hashes(2)
    first, second = pool.allocate(2) or []
    pool.publish(first, hashes[0])
    pool.publish(second, hashes[1])
    pool.release([first, second])
    assert pool.lookup(hashes) == [first, second]
    taken = pool.allocate(2) or []  # the never-hashed block first, then the tail before the head
    assert second in taken
    assert first not in taken
    assert pool.lookup(hashes) == [first]
    check_pool(pool)


def test_least_recently_used_prefix_goes_first():
    pool = BlockPool(3)
    a, b = _hashes(1, 1)[0], _hashes(1, 2)[0]
    for block_hash in (a, b):
        (block,) = pool.allocate(1) or []
        pool.publish(block, block_hash)
        pool.release([block])
    touched = pool.lookup([a])
    pool.share(touched)
    pool.release(touched)
    pool.allocate(1)
    assert pool.lookup([a]) == touched
    assert pool.lookup([b]) == []


def test_hash_chain_is_fixed_for_ever():
    """Two nodes of different versions must name equal blocks alike: these values may never change."""
    assert ROOT.hex() == "23f40c7905d8a621616a9704ef3bd82b"
    assert chain(ROOT, range(16)).hex() == "7087a60f1da1295a70777edbd304e09a"
    assert chain(ROOT, range(16)) != chain(chain(ROOT, range(16)), range(16))
    assert root_of(None) == root_of("") == ROOT != root_of("tenant")


def test_a_reset_pool_finds_nothing_and_gives_every_block_again():
    pool = BlockPool(4)
    pool.note_changes()
    used, free = _hashes(1, 1)[0], _hashes(1, 2)[0]
    first, second = pool.allocate(2) or []
    pool.publish(first, used)
    pool.publish(second, free)
    pool.release([second])
    pool.reset()
    assert (pool.lookup([used]), pool.lookup([free]), pool.cached) == ([], [], 0)
    assert (pool.free, pool.changes().cleared, pool.changes().cleared) == (2, True, False)
    check_pool(pool)
    pool.release([first])
    assert sorted(pool.allocate(3) or []) == [1, 2, 3]
    check_pool(pool)
