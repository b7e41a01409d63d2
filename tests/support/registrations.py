"""A worker's registration, for tests of its state alone."""

from core.wire.kv import KVLayoutInfo
from core.wire.messages import Register

REGISTRATION = Register(
    engine_id="w0",
    incarnation=7,
    role="decode",
    model="m",
    model_fingerprint=b"f",
    layout=KVLayoutInfo(
        dtype="float32", order="HND", block_size=16, num_layers=1, num_kv_heads=1, head_dim=8, block_bytes=1024
    ),
    max_model_len=64,
    max_num_seqs=2,
    num_blocks=8,
)
