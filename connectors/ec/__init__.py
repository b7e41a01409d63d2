"""EC connectors: they carry the embeddings of images from the worker that computes them to the workers that need them.

chunks                     the cut of embeddings into chunks of one size, and the seal of each chunk
chunk_cache                which chunks of host memory hold which embeddings
memory                     that memory and its seals
scheduler                  starts fetches and delays requests until they end     } on every worker
worker                     copies between host memory and the encoder cache      } that reads
p2p, produced_embeddings   reads from the encode worker that computed the embeddings
store_connector, store_offers, mover   go through a store that workers share (``kvstore``)
"""
