"""The health check of the images: exits with 0 if the server of this container answers 200.

Owns nothing but that question. KVRELAY_HEALTH_URL is where to ask, if the server listens elsewhere
than by default in the images.
"""

from __future__ import annotations

import os
import sys
import urllib.request

_DEADLINE_S = 5.0
_URL = "http://127.0.0.1:8000/health"

url = os.environ.get("KVRELAY_HEALTH_URL", _URL)
context = None
if url.startswith("https:"):
    import ssl

    # The router's certificate is for the name that clients use, not for the loopback address.
    context = ssl._create_unverified_context()
try:
    with urllib.request.urlopen(url, timeout=_DEADLINE_S, context=context):
        pass
except OSError as why:  # every HTTP status from 400 on, too
    sys.exit(f"{type(why).__name__}: {why}")
