"""Everything kdn raises on purpose.

A miss is a value, not an exception. An exception here means: these bytes, this model or this
request cannot be served correctly, and the message says what was expected and what was found.
"""


class KdnError(Exception):
    """Base of every error kdn raises on purpose."""


class FormatError(KdnError):
    """Bytes from outside are not what they claim to be."""


class MalformedError(FormatError):
    """A request or a manifest that cannot be understood."""


class TruncatedError(FormatError):
    """Bytes end before what the header promises."""


class ChecksumError(FormatError):
    """Bytes differ from those that were written."""


class AuthenticityError(FormatError):
    """Nobody who holds the namespace's secret wrote these bytes."""


class LimitError(FormatError):
    """A declared size is beyond what this reader accepts; nothing was allocated for it."""


class MismatchError(KdnError):
    """Valid bytes, but of another model, profile, context or stream than the one asked for."""


class UnsupportedError(KdnError):
    """A model, layout or option that kdn refuses by name."""


class ModelUnavailableError(KdnError):
    """A model could not be found, fetched or verified."""


class StoreError(KdnError):
    """A store cannot do what was asked: broken, full or gone. Nothing acknowledged is lost."""


class UnavailableError(StoreError):
    """A node cannot be reached, broke off, or says that it is in trouble: another may do better.
    What was asked of it may have happened all the same."""


class NoSpaceError(StoreError):
    """An object is larger than what the store may hold or the disk has left."""


class QuotaError(NoSpaceError):
    """A tenant would hold more than it may."""


class CentreAwayError(UnavailableError):
    """A region cannot reach its centre, and was asked for what only that can tell."""


class RefusedError(StoreError):
    """A place says no to whoever asks this: trying again changes nothing."""


class NotAllowedError(RefusedError):
    """This token, or none, may not do that there."""


class ReadOnlyError(RefusedError):
    """Nothing can be written there: an export is changed by `kdn export` alone."""


class ConditionError(KdnError):
    """A change was made for another version of a name than `newest`: the etag that is there, None
    if there is no such name."""

    def __init__(self, newest: str | None):
        super().__init__("the newest version is another one")
        self.newest = newest


class ForgottenError(KdnError):
    """Changes of names were asked for that are no longer known: list all names instead."""
