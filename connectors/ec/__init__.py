"""EC connectors: how the embeddings of images travel from whoever computes them to whoever needs them.

registry    connectors by name, and what a worker gets: both sides and their life in its event loop
chunks      how embeddings are cut into chunks of one size, and what each chunk's seal says
shelf       which chunks of host memory hold which embeddings
memory      that memory, and its seals
scheduler   what is fetched and for what a request waits           } of every worker that reads
worker      host memory to the encoder cache, and back             }
p2p, offers     read from the encode worker that has computed them
shared, stored, mover   through a store that all workers of a host share (``kvstore``)
"""
