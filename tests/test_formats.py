"""A format is one Rust file, one Python function and one kernel; `docs/add-a-format.md` says where they go."""

import re
from pathlib import Path
from typing import get_args

import pytest
import torch
from radixstate import ActivePool, CheckpointPool, StateSpec, Transfer
from radixstate.cuda import specialise
from radixstate.states import Format
from radixstate.states.formats import FORMATS

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "add-a-format.md").read_text()
ADDED = {"rust/codec/src/format/int4.rs", "kernels/int4.cu"}


def test_every_list_has_the_same_formats() -> None:
    variants = re.findall(r'Self::\w+ => "(\w+)",', (ROOT / "rust/codec/src/spec.rs").read_text())
    assert set(get_args(Format)) == set(FORMATS) == set(specialise.FORMATS) == set(variants)


@pytest.mark.parametrize("format", FORMATS)
def test_a_format_has_a_file_in_the_codec(format: str) -> None:
    assert (ROOT / "rust/codec/src/format" / f"{format}.rs").exists()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("layout", ["k_last", "v_last"])
def test_the_codec_takes_the_tensors_that_a_format_names(format: Format, dtype: str, layout: str) -> None:
    spec = StateSpec(layers=2, heads=3, d_k=5, d_v=7, dtype=dtype, layout=layout)
    active, kept = ActivePool(spec, 2), CheckpointPool(spec, 3, format=format)
    assert list(kept.rows) == list(spec.tensors(format))
    assert kept.nbytes == 4 * spec.slot_bytes(format)
    active.state(1).copy_(torch.randn(active.state(1).shape))
    transfer = Transfer(active, kept)
    assert transfer.store([(1, 3)]) == [True]
    transfer.load([(3, 2)])
    # A channel of int8 errs by half a step of its largest element, and the scale by 2^-9 of itself.
    assert torch.allclose(active.state(2).float(), active.state(1).float(), rtol=2**-8, atol=0.03)


def test_the_page_names_files_that_exist() -> None:
    named = set(re.findall(r"`((?:rust|python|kernels|tests)/[\w./]+)`", PAGE)) - ADDED
    assert len(named) > 10
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []


def test_the_pages_example_is_a_format() -> None:
    from radixstate.states import formats

    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names = dict(vars(formats))
    exec(code, names)
    tensors = names["int4"](StateSpec(layers=1, heads=2, d_k=5, d_v=3, layout="k_last"))
    assert {name: tensor.nbytes for name, tensor in tensors.items()} == {"state": 18, "scale": 40}
