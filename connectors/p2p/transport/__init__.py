"""How block bytes move: tcp, shm, nixl."""
