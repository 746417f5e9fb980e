import torch
from hypothesis import given
from hypothesis import strategies as st

from canter.engine.kv import ChunkStore, Rows, Shape, chunk_keys

SHAPE = Shape(layers=2, heads=1, head_dim=3)
ids = st.lists(st.integers(0, 3), max_size=12)


def make_chunk(tokens: int, value: float = 1.0) -> torch.Tensor:
    return torch.full((2, 2, 1, tokens, 3), value)


@given(a=ids, b=ids, salts=st.tuples(st.sampled_from("xy"), st.sampled_from("xy")))
def test_keys_are_equal_exactly_where_all_tokens_before_are(a, b, salts):
    chunk = 4
    for i, key in enumerate(chunk_keys(a, chunk, salts[0])):
        for j, other in enumerate(chunk_keys(b, chunk, salts[1])):
            ends = min(len(a), (i + 1) * chunk), min(len(b), (j + 1) * chunk)
            assert (key == other) == (salts[0] == salts[1] and a[: ends[0]] == b[: ends[1]])


def test_the_store_drops_what_was_unused_longest():
    store = ChunkStore(10)
    for name in (b"a", b"b"):
        store.put(name, make_chunk(4))
    assert store.get(b"a") is not None
    store.put(b"c", make_chunk(4))
    assert [store.get(name) is not None for name in (b"a", b"b", b"c")] == [True, False, True]
    store.put(b"d", make_chunk(11))
    assert [store.get(name) is not None for name in (b"a", b"c", b"d")] == [False, False, False]
    store.put(b"e", make_chunk(10))
    store.clear()
    assert store.get(b"e") is None


def test_rows_keep_their_contents_when_moved_and_resized():
    rows = Rows(SHAPE, dtype=torch.float32, device=torch.device("cpu"))
    rows.resize(2, 4)
    rows.write(0, 1, make_chunk(2, 7.0))
    rows.move(0, 1, 3)
    rows.resize(3, 8)
    assert (rows.rows, rows.positions) == (3, 8)
    assert torch.equal(rows.read(1, 1, 3), make_chunk(2, 7.0))
    assert torch.equal(rows.read(1, 3, 8), make_chunk(5, 0.0))
    rows.resize(1, 2)
    assert torch.equal(rows.read(0, 1, 2), make_chunk(1, 7.0))


def test_the_caches_write_where_they_say():
    rows = Rows(SHAPE, dtype=torch.float32, device=torch.device("cpu"))
    rows.resize(3, 5)
    span = rows.span(0, 1, 3)
    keys, values = span.update(make_chunk(2, 1.0)[0, :1], make_chunk(2, 2.0)[0, :1], 1)
    assert keys[0, 0, :, 0].tolist() == [0, 1, 1]
    assert values[0, 0, :, 0].tolist() == [0, 2, 2]
    column = rows.column(1, torch.tensor([2, 0]), 3)
    keys, _ = column.update(torch.full((2, 1, 1, 3), 5.0), torch.full((2, 1, 1, 3), 6.0), 0)
    assert keys[:, 0, :, 0].tolist() == [[0, 0, 5], [5, 0, 0]]
    assert rows.read(2, 0, 1)[0, :, 0, 0, 0].tolist() == [5, 6]
    assert rows.read(0, 0, 3)[1, 0, 0, :, 0].tolist() == [0, 1, 1]
