"""Every exception that Atoll raises on purpose, in one tree.

    AtollError
    ├── ConfigError              a setting is wrong; also a ValueError
    │   └── LayoutError          the model cannot be laid out as asked
    ├── PayloadError             bytes that do not decode: truncated, corrupted, oversized, not finite
    ├── ProtocolError
    │   ├── LocalProtocolError   this process broke the rules (a bug or a misuse of the API)
    │   └── RemoteProtocolError  the other side broke the rules
    ├── RefusedError             the syncer said no, with a code and a remedy
    │   └── FencedError          a newer process took this learner's id
    ├── UnreachableError         no syncer answered in time
    │   └── CertificateError     one answered whose certificate cannot be trusted
    ├── IslandError              the processes of one learner cannot go on together
    ├── CorpusError              no usable training data
    ├── StoreError               state or a snapshot on disk that cannot be used
    │   └── FencedSyncerError    a newer syncer has taken over this run
    ├── LabError                 a run of the lab that cannot come to its end
    └── LaunchError              processes could not be started or a run folder not be used

Messages name what happened and where, and end with what to do.
"""

from __future__ import annotations


class AtollError(Exception):
    """Base of every error that Atoll raises on purpose."""


class ConfigError(AtollError, ValueError):
    """A setting has a value that cannot work."""


class LayoutError(ConfigError):
    """The model's tensors cannot be laid out into fragments as asked."""


class PayloadError(AtollError):
    """Encoded bytes are truncated, corrupted, of the wrong size or not finite."""


class ProtocolError(AtollError):
    """A rule of the protocol was broken."""


class LocalProtocolError(ProtocolError):
    """This process broke the rules: a bug in Atoll or a misuse of its API."""


class RemoteProtocolError(ProtocolError):
    """The other side broke the rules."""


class RefusedError(AtollError):
    """The syncer refused a learner or a transfer. `code` is stable and machine-readable."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(f"{detail} [{code}]")
        self.code = code
        self.detail = detail


class FencedError(RefusedError):
    """A newer process joined under this learner's id, so this one may no longer contribute."""


class UnreachableError(AtollError):
    """No syncer answered in time."""


class CertificateError(UnreachableError):
    """The syncer's certificate cannot be trusted: expired, of another authority or for another name. Trying again does
    not help."""


class IslandError(AtollError):
    """The processes (ranks) of one learner cannot go on together: one is gone, stands still or does something else."""


class CorpusError(AtollError):
    """The corpus is missing, empty or too small."""


class StoreError(AtollError):
    """A state folder or a snapshot cannot be used: locked, damaged, incomplete or of an unknown format."""


class FencedSyncerError(StoreError):
    """A newer syncer has taken over this run, so this one may no longer commit or publish."""


class LabError(AtollError):
    """A run of the lab cannot come to its end, or an invariant of the protocol was broken in it."""


class LaunchError(AtollError):
    """Processes could not be started, or the run folder cannot be used."""
