"""``kvferry advise``: whether a trace of requests is served better by prefill and decode workers or by aggregated ones."""
