"""Requests and namespaces as other processes send them, and memory that is a buffer in its own way."""

import copy
import ctypes
import pickle
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, Literal

import numpy as np
import pytest
from native import PROMPT, make, running
from radixstate import Namespace, PrefixCache, StartRequest, StateSpec
from radixstate.errors import MisuseError, TensorError

NAMESPACES = [Namespace(), Namespace(7, "tenant \u00e9\U0001f600", 2**64 - 1), Namespace(tenant="")]
DUPLICATES: list[Callable[[Any], Any]] = [copy.copy, copy.deepcopy] + [
    lambda it, protocol=protocol: pickle.loads(pickle.dumps(it, protocol))
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1)
]
every_way = pytest.mark.parametrize("duplicate", DUPLICATES)


def fields(request: StartRequest) -> tuple[object, ...]:
    return (
        request.tokens,
        request.namespace,
        request.reserve,
        request.max_length,
        request.no_read,
        request.no_store,
        request.slots,
    )


@every_way
def test_a_namespace_is_pickled_and_copied(duplicate: Callable[[Namespace], Namespace]) -> None:
    for namespace in NAMESPACES:
        assert duplicate(namespace) == namespace
    assert len({duplicate(namespace) for namespace in NAMESPACES}) == len(NAMESPACES)


@every_way
def test_a_request_is_pickled_and_copied_with_all_its_options(
    duplicate: Callable[[StartRequest], StartRequest],
) -> None:
    plain = StartRequest([1, 2**32 - 1])
    assert fields(duplicate(plain)) == ([1, 2**32 - 1], Namespace(), None, None, False, False, 1)
    for namespace in NAMESPACES:
        request = StartRequest(
            PROMPT, namespace, reserve=9, max_length=4, no_read=True, no_store=True, slots=2
        )
        assert fields(duplicate(request)) == (list(PROMPT), namespace, 9, 4, True, True, 2)


def tokenize(text: str) -> StartRequest:
    """What a process of its own does."""
    return StartRequest(list(text.encode()), Namespace(tenant=text))


def test_a_process_that_tokenizes_sends_requests() -> None:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as tokenizer:
        request = tokenizer.submit(tokenize, "abc").result()
    (started,) = make().start_many([request])
    assert not isinstance(started, Exception)
    assert fields(request)[:2] == ([97, 98, 99], Namespace(tenant="abc"))


@pytest.mark.parametrize(
    ("tenant", "half", "at"), [("\ud800", r"\ud800", 0), ("ab\udcff\ud800", r"\udcff", 2)]
)
def test_a_tenant_that_is_not_text_is_misuse(tenant: str, half: str, at: int) -> None:
    """As from `os.fsdecode` of bytes that are no UTF-8."""
    with pytest.raises(MisuseError) as refused:
        Namespace(tenant=tenant)
    assert str(refused.value) == f"namespace: the lone surrogate '{half}' at position {at} is not text"


def test_a_tenant_is_any_text() -> None:
    for tenant in ("", "\0", "\ufffd", "\U0010ffff" * 1000):
        assert Namespace(tenant=tenant).tenant == tenant
    with pytest.raises(TypeError):
        Namespace(tenant=b"bytes")  # type: ignore[arg-type]


def test_a_pools_name_that_is_not_text_is_none_of_them() -> None:
    with pytest.raises(MisuseError, match="is none of 'kv', 'active', 'checkpoint'"):
        make().usage("kv\ud800")  # type: ignore[arg-type]


def test_the_pool_of_checkpoints_is_named_in_the_singular_or_the_plural() -> None:
    """As `cache.checkpoints` and `stats().bytes.checkpoints` are. Answers and errors keep to `checkpoint`."""
    spec = StateSpec(layers=1, heads=1, d_k=2, d_v=2, dtype="float32", layout="v_last")
    front = PrefixCache(
        spec, active_slots=1, checkpoint_slots=3, kv_pages=8, page_size=4, checkpoint_stride=4
    )
    for cache in (make(), front):
        assert cache.usage("checkpoints") == cache.usage("checkpoint") != cache.usage("kv")
    names: tuple[Literal["checkpoint", "checkpoints"], ...] = ("checkpoint", "checkpoints")
    for name in names:
        with front.start([1, 2, 3, 4, 5]) as seq:
            seq.checkpoint(4)
        assert front.evict(name, 1).as_dict() == {"kv": 1, "checkpoints": 1}


# --- ctypes: buffers without strides ---

INTEGERS = [ctypes.c_uint32, ctypes.c_int32, ctypes.c_uint64, ctypes.c_int64, ctypes.c_long, ctypes.c_size_t]


@pytest.mark.parametrize("integer", INTEGERS)
def test_tokens_are_read_from_ctypes(integer: Any) -> None:
    tokens = [0, 1, 2**31 - 1]
    assert StartRequest((integer * 3)(*tokens)).tokens == tokens
    assert StartRequest((integer * 0)()).tokens == []


@pytest.mark.parametrize(
    ("array", "why"),
    [
        ((ctypes.c_int16 * 3)(), "native int32, int64, uint32 or uint64 expected, got <h"),
        ((ctypes.c_uint32.__ctype_be__ * 3)(), "native int32, int64, uint32 or uint64 expected, got >I"),
        ((ctypes.c_float * 3)(), "expected, got <f"),
        ((ctypes.c_int32 * 3 * 2)(), "1 dimension expected, got 2"),
    ],
    ids=["int16", "big-endian", "float", "table"],
)
def test_ctypes_that_hold_no_tokens_are_refused(array: Any, why: str) -> None:
    with pytest.raises(TensorError, match=why):
        StartRequest(array)


def test_a_number_of_ctypes_is_no_list_of_tokens() -> None:
    with pytest.raises((TensorError, TypeError)):
        StartRequest(ctypes.c_int32(3))  # type: ignore[arg-type]


def test_page_ids_are_written_into_ctypes() -> None:
    cache = make()
    seq = running(cache).sequence
    table = (ctypes.c_int32 * 9)()
    count = cache.copy_pages(seq, table)
    assert list(table)[:count] == cache.pages(seq)
    with pytest.raises(TensorError, match='elements of format "<q"'):
        cache.copy_pages(seq, (ctypes.c_int64 * 9)())


def test_page_ids_are_not_written_off_their_alignment() -> None:
    cache = make()
    seq = running(cache).sequence
    odd = np.frombuffer(bytearray(41), np.uint8)[1:].view(np.int32)
    assert odd.ctypes.data % 4
    with pytest.raises(TensorError, match="got one that is not aligned to 4 bytes"):
        cache.copy_pages(seq, odd)
    assert not odd.any()
