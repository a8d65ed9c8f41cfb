from .authority import make_authority, renew_certificate
from .book import KeyFile
from .registry import CERTIFICATE_FILE, KEY_FILE, KEYS_FILE, Key, issue, read_keys, registry_path, revoke, write_private

__all__ = [
    "CERTIFICATE_FILE",
    "KEYS_FILE",
    "KEY_FILE",
    "Key",
    "KeyFile",
    "issue",
    "make_authority",
    "read_keys",
    "registry_path",
    "renew_certificate",
    "revoke",
    "write_private",
]
