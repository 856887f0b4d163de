"""Addresses of folders in other file systems, and what they may not hold: a password or a key."""

from __future__ import annotations

import re
from urllib.parse import unquote

from environments.errors import ConfigError

SECRETS = re.compile(
    r"(?<=://)(?![^\s:/@]+:\d{1,5}/)[^\s@]*:\S*@"  # a name and a password, and no host with its port
    r"|(?<![\w/])[\w.+-]+:(?!//)\S*@"  # the same without a protocol, or before another one
    r"|(?<=http://)[^\s/@]+@|(?<=https://)[^\s/@]+@"  # a token
    r"|(?<=[?#])[^\s'\"]+"
    r"|(?i:\b[\w-]*(?:key|token|secret|passw|pwd|signature|credential)[\w-]*)=[^\s'\"]*"
)


def masked(text: str) -> str:
    """The text with stars in the place of what may be a password or a key in an address."""
    return SECRETS.sub("***", text)


def check_address(setting: str, address: object) -> None:
    """Raise ``ConfigError`` unless ``address`` is a text without a password or a key."""
    if not isinstance(address, str):
        raise ConfigError(f"{setting} has to be an address, such as s3://bucket/run.")
    for plain in (address, unquote(address)):  # a password may have a slash only as %2F
        if masked(plain) == plain:
            continue
        raise ConfigError(
            f"{setting}={masked(plain)} holds what may be a password or a key, which logs and settings.yaml "
            "would show: leave it out, and set it in variables or files of the package of the file system, "
            "such as AWS_ACCESS_KEY_ID, or of fsspec, such as FSSPEC_FTP_PASSWORD."
        )
