"""The proxies of macOS, which urllib asks for: none."""

_get_proxy_settings = _get_proxies = dict
