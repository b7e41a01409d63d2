"""The Redis tier: one key per block in a Redis or Valkey server, which limits and evicts by its own settings.

Owns keys and values there: ``kvferry:1:<packed key>`` holds the seal, then the block. Connecting and each receive of a call
have a time limit; resolving the server's name has the resolver's. A server that fails is not called for a while, so that a dead
one delays a few calls and not all. One that refuses a command (its memory is full, it is read-only, the user may not) is alive:
a refused save is a failed one, and reads go on. The library is imported here only (extra ``redis``). Set ``maxmemory`` and an
eviction policy there: this tier deletes corrupt blocks only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

from core.clock import Clock, SystemClock
from core.config_checks import check_redis_url
from core.errors import ConfigError, ConnectorUnavailable, CorruptBlock, KVFerryError, Unavailable
from core.kv.seals import SEAL_BYTES
from core.log import event
from core.rate_limit import LimitedLog
from kvstore.tiers.base import Tier, TierBlock

PREFIX = b"kvferry:1:"
PAUSE_S = 2.0  # after a failure
_SETTING = "kvstore.redis_url"

_log = logging.getLogger(__name__)

T = TypeVar("T")


class RedisTier(Tier):
    """Keeps blocks in a Redis server, for every store that uses it.

    Raises: ConnectorUnavailable if the library is missing, ConfigError if the address is invalid or holds a password.
    """

    name = "redis"

    def __init__(self, url: str, timeout_s: float, ttl_s: float = 0.0, clock: Clock | None = None, password: str = "") -> None:
        try:
            import redis
        except ImportError:
            raise ConnectorUnavailable("kvstore.redis_url needs the redis library: pip install 'kvferry[redis]'") from None
        check_redis_url(_SETTING, url)
        try:
            self._redis = redis.Redis.from_url(
                url,
                password=password or None,
                socket_timeout=timeout_s,
                socket_connect_timeout=timeout_s,
                decode_responses=False,
                protocol=2,
            )
            pool = self._redis.connection_pool
            pool.connection_class(**pool.connection_kwargs)  # connects to nothing, and takes known options only
        except Exception:  # any, by the option behind "?"; it is not quoted, as it may be a password
            raise ConfigError(f"{_SETTING}: an option in it is unknown or has a wrong value", param=_SETTING) from None
        self._failures = (redis.RedisError, OSError)
        self._refusal = redis.ResponseError
        self._is_down = redis.exceptions.ClusterDownError  # a refusal of every command; also of a replica without its master
        self._is_elsewhere = redis.exceptions.AskError  # and MovedError: another node of a cluster has the key
        self._ttl_ms = max(1, round(1000 * ttl_s)) if ttl_s else None
        self._clock = clock or SystemClock()
        self._limited_log = LimitedLog(_log, self._clock.now)
        self._resume_at = 0.0

    def check(self) -> None:
        """Look a block up: else nobody hears of a wrong password before the first block comes."""
        try:
            self.locate([b"check"])
        except KVFerryError as error:
            self._warn_unusable(error.message)
        except Exception as error:  # of an option in the address that only connecting shows; it may be a password
            self._warn_unusable(f"an option in it has a wrong value ({type(error).__name__})")

    def _warn_unusable(self, reason: str) -> None:
        fix = f"start it, or correct {_SETTING}; its password is kvstore.redis_password, $KVFERRY_REDIS_PASSWORD"
        _log.warning(event("kvstore_redis_unusable", setting=_SETTING, reason=reason, fix=fix))

    def knows(self, key: bytes) -> None:
        """Return None: only the server knows."""

    def locate(self, keys: Sequence[bytes]) -> list[bool]:
        """Query all keys in one message."""

        def ask() -> list[bool]:
            pipeline = self._redis.pipeline(transaction=False)
            for key in keys:
                pipeline.exists(PREFIX + key)
            return self._checked(pipeline.execute(raise_on_error=False))

        return self._try(ask)

    def _checked(self, answers: Sequence[object]) -> list[bool]:
        """Return what is there; a key whose lookup the server refuses is not, unless it refuses all."""
        refusals = [answer for answer in answers if isinstance(answer, self._refusal)]
        if refusals:
            if len(refusals) == len(answers) or any(isinstance(refusal, self._is_down) for refusal in refusals):
                raise refusals[0]
            self._limited_log.warning("kvstore_redis_refuses_blocks", error=self._reason_of(refusals[0]))
        return [bool(answer) and not isinstance(answer, self._refusal) for answer in answers]

    def load(self, key: bytes, target: memoryview) -> TierBlock | None:
        """Get a value."""
        value = self._try(lambda: self._get(key))
        if value is None:
            return None
        if not isinstance(value, bytes) or len(value) <= SEAL_BYTES:
            raise CorruptBlock(f"the value of {key.hex()} is no block")
        num_bytes = len(value) - SEAL_BYTES
        if num_bytes > target.nbytes:  # it would stay forever: an existing value is never replaced
            raise CorruptBlock(f"the value of {key.hex()} has {num_bytes} bytes, and a slot {target.nbytes}")
        target[:num_bytes] = memoryview(value)[SEAL_BYTES:]
        return TierBlock(num_bytes, value[:SEAL_BYTES])

    def _get(self, key: bytes) -> object:
        try:
            return self._redis.get(PREFIX + key)
        except self._refusal as error:
            if str(error).startswith("WRONGTYPE"):
                raise CorruptBlock(f"the value of {key.hex()} is no string") from None
            raise

    def save(self, key: bytes, seal: bytes, block: memoryview) -> bool:
        """Set a value that does not exist yet; False if the server refuses it."""
        value = b"".join((seal, block))
        return self._try(lambda: self._set(PREFIX + key, value))

    def _set(self, name: bytes, value: bytes) -> bool:
        try:
            self._redis.set(name, value, nx=True, px=self._ttl_ms)
        except self._refusal as error:
            if isinstance(error, self._is_down):
                raise
            self._limited_log.warning("kvstore_redis_refuses_blocks", error=self._reason_of(error))
            return False
        return True

    def remove(self, key: bytes) -> None:
        """Delete a value."""
        self._try(lambda: self._redis.delete(PREFIX + key))

    def close(self) -> None:
        """Close the connections."""
        self._redis.close()

    def _try(self, call: Callable[[], T]) -> T:
        if self._clock.now() < self._resume_at:
            raise Unavailable("Redis has failed a moment ago")
        try:
            return call()
        except self._failures as error:
            if not isinstance(error, self._refusal) or isinstance(error, self._is_down):
                self._resume_at = self._clock.now() + PAUSE_S
            raise Unavailable(f"Redis fails: {self._reason_of(error)}") from None

    def _reason_of(self, error: Exception) -> str:
        if isinstance(error, self._is_elsewhere):
            return "kvstore.redis_url is a node of a Redis Cluster, which is not supported: name a single server, or a proxy"
        return str(error)
