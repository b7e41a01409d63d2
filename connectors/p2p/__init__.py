"""Hand-over of KV blocks from a prefill to a decode worker."""
