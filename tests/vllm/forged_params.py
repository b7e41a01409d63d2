"""``kv_transfer_params`` that a careless or hostile client might send."""

import msgspec

from connectors.vllm.handoff_params import decode_handoff, encode_handoff


def with_blocks_of(params, other):
    """Return a handoff with its own lease and hashes, and the blocks of another one under that one's generations."""
    handoff, donor = decode_handoff(params), decode_handoff(other)
    return encode_handoff(msgspec.structs.replace(handoff, groups=donor.groups), "forged")
