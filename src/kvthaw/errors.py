"""Errors that name the field, the value and what is allowed."""


class KvthawError(Exception):
    """Base of every error that kvthaw raises itself."""


class ConfigError(KvthawError, ValueError):
    """A setting is out of range or settings do not fit together."""


class UnsupportedModelError(KvthawError, TypeError):
    """The model cannot be attached to; the message says why."""


class CacheError(KvthawError, RuntimeError):
    """A cache was used in a way that would give a wrong answer."""


class HostMemoryError(KvthawError, MemoryError):
    """The host cannot hold the KV that would be offloaded; the message gives the bytes needed."""
