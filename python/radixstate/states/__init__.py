"""What a model keeps per sequence, the formats it is kept in, and the two pools of tensors that hold it."""

from radixstate.states.formats import Format
from radixstate.states.pools import ActivePool, CheckpointPool, GroupTensors
from radixstate.states.presets import Layout
from radixstate.states.rows import Rows, TensorSpec
from radixstate.states.spec import ConvSpec, StateSpec

__all__ = [
    "ActivePool",
    "CheckpointPool",
    "ConvSpec",
    "Format",
    "GroupTensors",
    "Layout",
    "Rows",
    "StateSpec",
    "TensorSpec",
]
