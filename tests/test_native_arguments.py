"""What the native cache reads: tokens from every kind of memory, and numbers that fit."""

from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from native import DEPTH, PROMPT, make, reserve, running, store
from radixstate import _native
from radixstate._native import Cache, Namespace, StartRequest
from torch._subclasses.fake_tensor import FakeTensorMode

SOURCES: dict[str, Callable[[list[int]], Any]] = {
    "list": list,
    "tuple": tuple,
    "generator": iter,
    "numpy ints": lambda tokens: [np.int32(token) for token in tokens],
    "array I": lambda tokens: array("I", tokens),
    "array i": lambda tokens: array("i", tokens),
    "array q": lambda tokens: array("q", tokens),
    "array Q": lambda tokens: array("Q", tokens),
    "array l": lambda tokens: array("l", tokens),
    "memoryview": lambda tokens: memoryview(array("I", [77, *tokens]))[1:],
    "read-only numpy": lambda tokens: np.frombuffer(array("q", tokens).tobytes(), np.int64),
    "numpy uint32": lambda tokens: np.array(tokens, np.uint32),
    "numpy int32": lambda tokens: np.array(tokens, np.int32),
    "numpy int64": lambda tokens: np.array(tokens, np.int64),
    "numpy uint64": lambda tokens: np.array(tokens, np.uint64),
    "torch int32": lambda tokens: torch.tensor(tokens, dtype=torch.int32),
    "torch int64": lambda tokens: torch.tensor([77, *tokens])[1:],
    "torch uint32": lambda tokens: torch.tensor(tokens, dtype=torch.uint32),
    "torch uint64": lambda tokens: torch.tensor(tokens, dtype=torch.uint64),
}


@pytest.mark.parametrize("source", SOURCES)
def test_tokens_are_read_from(source: str) -> None:
    tokens = [0, 1, 2**31 - 1, *range(100, 140)]
    cache = make(kv_pages=64)
    started = running(cache, SOURCES[source](tokens))
    assert cache.tokens(started.sequence) == tokens
    cache.commit(started.sequence, reserve(cache, started, 40))
    assert cache.lookup(SOURCES[source](tokens)).length == 40
    assert len(StartRequest(SOURCES[source](tokens))) == 43


@pytest.mark.parametrize(
    "make_tokens",
    [
        list,
        tuple,
        lambda tokens: array("I", tokens),
        lambda tokens: array("q", tokens),
        lambda tokens: np.array(tokens, np.uint32),
        lambda tokens: np.array(tokens, np.int64),
        lambda tokens: torch.tensor(tokens, dtype=torch.int64),
        lambda tokens: torch.tensor(tokens, dtype=torch.uint32),
    ],
)
def test_the_largest_token_and_no_token_at_all(make_tokens: Callable[[list[int]], Any]) -> None:
    cache = make()
    assert cache.tokens(cache.start(make_tokens([2**32 - 1])).sequence) == [2**32 - 1]
    with pytest.raises(_native.EmptyPromptError):
        cache.lookup(make_tokens([]))


OUT_OF_RANGE: list[tuple[Any, int, int]] = [
    ([1, -1], 1, -1),
    ((2**32,), 0, 2**32),
    ([5, 10**30], 1, 10**30),
    (array("i", [3, 4, -2]), 2, -2),
    (array("q", [3, 2**40, -2]), 1, 2**40),
    (array("Q", [2**64 - 1]), 0, 2**64 - 1),
    (np.array([7, 8, 2**32]), 2, 2**32),
    (np.array([-(2**63)]), 0, -(2**63)),
    (torch.tensor([1, 2, 3, -100]), 3, -100),
    (torch.tensor([-1], dtype=torch.int32), 0, -1),
]


@pytest.mark.parametrize(("tokens", "position", "value"), OUT_OF_RANGE)
def test_a_token_out_of_range_is_named(tokens: Any, position: int, value: int) -> None:
    cache = make()
    started = running(cache, reserve=20)
    for use in (cache.lookup, cache.start, StartRequest, lambda bad: cache.append(started.sequence, bad)):
        with pytest.raises(_native.TokenRangeError) as caught:
            use(tokens)
        assert str(caught.value) == f"token {value} at position {position} is outside 0..2**32 - 1"
    assert cache.length(started.sequence) == 9


class Index:
    """An integer that runs code when it is read."""

    def __init__(self, value: int, code: Callable[[], object] = lambda: None) -> None:
        self._value, self._code = value, code

    def __index__(self) -> int:
        self._code()
        return self._value


class Subclass(int):
    """An `int` as well."""


def test_a_list_may_hold_integers_of_every_kind() -> None:
    cache = make()
    mixed: list[Any] = [0, 2**32 - 1, True, np.int64(7), Subclass(8), Index(9), 10]
    assert cache.tokens(cache.start(mixed).sequence) == [0, 2**32 - 1, 1, 7, 8, 9, 10]


@pytest.mark.parametrize("value", [-1, 2**32, -(2**63), 2**64, 2**5000, Index(-1), Subclass(2**32)])
@pytest.mark.parametrize("before", [[], [1, 2], [1, Index(2)]], ids=["first", "third", "behind an index"])
def test_a_list_says_where_a_number_is_out_of_range(value: Any, before: list[Any]) -> None:
    with pytest.raises(_native.TokenRangeError, match=f"at position {len(before)} is outside"):
        make().lookup([*before, value, 5])


@pytest.mark.parametrize("value", [None, 1.0, "1", b"1"])
def test_a_list_with_something_else_than_an_integer_is_refused(value: Any) -> None:
    with pytest.raises(TypeError):
        make().lookup([1, value])


def test_a_list_that_its_own_items_change_while_it_is_read_gives_what_was_there() -> None:
    cache = make()
    shrinking: list[Any] = [1, 2, 3, 4, 5, 6]
    shrinking[2] = Index(3, lambda: shrinking.__delitem__(slice(4, None)))
    growing: list[Any] = [1, 2]
    growing[1] = Index(2, lambda: growing.append(3))
    emptied: list[Any] = [1, 2, 3]
    emptied[0] = Index(1, emptied.clear)
    for tokens, expected in ((shrinking, [1, 2, 3, 4]), (growing, [1, 2, 3]), (emptied, [1])):
        assert cache.tokens(cache.start(tokens).sequence) == expected


EXPECTED = "native int32, int64, uint32 or uint64 expected, got"
UNFIT: list[tuple[Any, str]] = [
    (b"abcd", f"{EXPECTED} B"),
    (np.array([1.0]), f"{EXPECTED} d"),
    (np.array([1], np.int16), f"{EXPECTED} h"),
    (np.array([1], ">i8"), f"{EXPECTED} >q"),
    (np.array([True]), f"{EXPECTED} ?"),
    (np.array([[1, 2]]), "1 dimension expected, got 2"),
    (np.array(5), "no readable buffer: shape is null"),
    (np.arange(10)[::2], "contiguous memory expected, got a strided view"),
    (np.arange(10, dtype=np.uint32)[::-1], "contiguous memory expected, got a strided view"),
    (np.zeros(17, np.uint8)[1:].view(np.int64), "can't be of 8 bytes"),
    (torch.tensor([1.0]), f"{EXPECTED} torch.float32"),
    (torch.tensor([1], dtype=torch.int16), f"{EXPECTED} torch.int16"),
    (torch.tensor([[1, 2]]), "1 dimension expected, got 2"),
    (torch.tensor(5), "1 dimension expected, got 0"),
    (torch.arange(10)[::2], "contiguous memory expected, got a strided view"),
    (torch.empty(3, dtype=torch.int64, device="meta"), "a cpu tensor expected, got one on meta"),
]


@pytest.mark.parametrize(("tokens", "message"), UNFIT)
def test_memory_that_does_not_hold_tokens_is_refused(tokens: Any, message: str) -> None:
    with pytest.raises(_native.TensorError) as caught:
        make().lookup(tokens)
    assert str(caught.value).startswith("tokens: ")
    assert str(caught.value).endswith(message)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_a_tensor_without_memory_is_refused() -> None:
    with FakeTensorMode():
        fake = torch.tensor([1, 2, 3])
    with pytest.raises(_native.TensorError, match="3 numbers at address 0x0"):
        make().lookup(fake)


class Pretender:
    """Has an address like a tensor, and is none."""

    def data_ptr(self) -> int:
        return 1


@pytest.mark.parametrize("tokens", [5, None, "abc", [1, "a"], [1.5], [None], Pretender()])
def test_what_holds_no_integers_is_a_type_error(tokens: Any) -> None:
    with pytest.raises(TypeError):
        make().lookup(tokens)


def test_an_array_is_free_to_grow_after_the_call() -> None:
    cache = make()
    tokens = array("I", PROMPT)
    store(cache, tokens)
    tokens.append(9)
    assert cache.lookup(tokens).length == DEPTH


def numbers(cache: Cache) -> dict[str, Callable[[Any], object]]:
    """Every argument that is an integer of 64 bits, by name and where it is given."""
    sequence = cache.start(PROMPT).sequence
    return {
        "tokens of legal_depth": cache.legal_depth,
        "n of evict": lambda number: cache.evict("kv", number),
        "n of grow": lambda number: cache.grow(sequence, number),
        "depth of reserve_checkpoint": lambda number: cache.reserve_checkpoint(sequence, number, 1),
        "step of retire_step": cache.retire_step,
        "step of cancel_step": cache.cancel_step,
        "ticket of complete": lambda number: cache.complete(number, True),
        "max_length of lookup": lambda number: cache.lookup(PROMPT, max_length=number),
        "reserve of start": lambda number: cache.start(PROMPT, reserve=number),
        "max_length of start": lambda number: cache.start(PROMPT, max_length=number),
        "reserve of StartRequest": lambda number: StartRequest(PROMPT, reserve=number),
        "max_length of StartRequest": lambda number: StartRequest(PROMPT, max_length=number),
        "adapter of Namespace": Namespace,
        "weights of Namespace": lambda number: Namespace(weights=number),
        "kv_page_bytes of Cache": lambda number: make(kv_page_bytes=number),
        "active_bytes of Cache": lambda number: make(active_bytes=number),
        "checkpoint_bytes of Cache": lambda number: make(checkpoint_bytes=number),
    }


NUMBERS = sorted(numbers(make()))


@pytest.mark.parametrize("argument", NUMBERS)
@pytest.mark.parametrize("number", [-1, 2**64, np.int32(-7)])
def test_a_number_that_does_not_fit_is_misuse_with_its_name(argument: str, number: Any) -> None:
    name = argument.split()[0]
    with pytest.raises(_native.MisuseError) as refused:
        numbers(make())[argument](number)
    assert str(refused.value) == f"{name} {number} is outside 0..2**64 - 1"


@pytest.mark.parametrize("argument", NUMBERS)
@pytest.mark.parametrize("number", [1.0, "1", []])
def test_a_number_is_an_integer(argument: str, number: Any) -> None:
    with pytest.raises(TypeError, match=f"'{argument.split()[0]}'"):
        numbers(make())[argument](number)


@pytest.mark.parametrize(
    "size", ["page_size", "checkpoint_stride", "kv_pages", "active_slots", "checkpoint_slots"]
)
@pytest.mark.parametrize("number", [-1, 2**32])
def test_a_size_that_does_not_fit_is_a_configuration_that_cannot_work(size: str, number: int) -> None:
    with pytest.raises(_native.ConfigError) as refused:
        make(**{size: number})
    assert str(refused.value) == f"{size} {number} is outside 0..2**32 - 1"


def test_a_source_that_does_not_fit_is_not_a_slot_of_the_sequence() -> None:
    cache = make()
    sequence = cache.start(PROMPT).sequence
    with pytest.raises(_native.NotYourSlotError, match=r"^source -1 is outside 0\.\.2\*\*32 - 1$"):
        cache.reserve_checkpoint(sequence, DEPTH, -1)


def test_numbers_of_numpy_are_numbers() -> None:
    assert make().legal_depth(np.uint8(DEPTH)) == DEPTH


def test_a_number_that_python_does_not_print() -> None:
    with pytest.raises(_native.MisuseError, match=r"^n \(too long to print\) is outside"):
        make().evict("kv", 10**5000)
    with pytest.raises(
        _native.TokenRangeError, match=r"^token \(too long to print\) at position 1 is outside"
    ):
        make().lookup([1, 10**5000])


def test_page_ids_are_written_into_a_row_of_a_table() -> None:
    cache = make()
    store(cache)
    seq = running(cache).sequence
    lease = cache.lease(cache.lookup(PROMPT))
    for ids, copy in (
        (cache.pages(seq), lambda out: cache.copy_pages(seq, out)),
        (cache.lease_pages(lease), lambda out: cache.copy_lease_pages(lease, out)),
    ):
        table = np.full((2, 6), -1, dtype=np.int32)
        assert copy(table[1]) == len(ids)
        assert table[1].tolist() == ids + [-1] * (6 - len(ids))
        assert (table[0] == -1).all()
        kept = array("i", [-1] * (len(ids) - 1))
        with pytest.raises(
            _native.LengthMismatchError,
            match=f"{len(ids)} are to be written, the buffer has room for {len(ids) - 1}",
        ):
            copy(kept)
        assert set(kept) == {-1}, "nothing was written"


@pytest.mark.parametrize(
    "out",
    [
        np.zeros(9, dtype=np.int64),
        np.zeros(9, dtype=">i4"),
        np.zeros(18, dtype=np.int32)[::2],
        bytes(36),
        memoryview(bytes(36)).cast("i"),
        [0] * 9,
    ],
    ids=["int64", "big-endian", "strided", "bytes", "read-only", "list"],
)
def test_page_ids_go_only_into_writable_int32(out: object) -> None:
    cache = make()
    seq = running(cache).sequence
    with pytest.raises(
        _native.TensorError, match="pages: a contiguous, writable buffer of int32 expected, got "
    ):
        cache.copy_pages(seq, out)  # type: ignore[arg-type]  # that is the point
