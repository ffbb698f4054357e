"""One real request to a service: the last word on whether production is back.

``urllib`` and what it pulls in are loaded only here, when a probe runs; they cost more than the rest of the guard.
Redirects are not followed and proxies are not used: the probe asks this host, nobody else.
"""

from __future__ import annotations

from windows.guard import clock

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Json = dict[str, Any]

BODY_LIMIT = 1 << 20


def probe_until(service: Json, timeout_s: float, alive: object = None) -> Json | None:
    """Probe until it answers as expected, at most ``timeout_s`` or until ``alive()`` is false; None without a probe."""
    if service["probe"] is None:
        return None
    last: Json = {}

    def good() -> bool:
        last.update(probe_once(service))
        return bool(last["ok"]) or (callable(alive) and not alive())

    clock.wait_until(good, timeout_s, 0.25)
    return last


def probe_once(service: Json) -> Json:
    """One request: ``{service, url, status, elapsed_ns, ok, detail}``."""
    import http.client
    import urllib.error
    import urllib.request

    wanted = service["probe"]
    started = clock.monotonic_ns()
    result: Json = {"service": service["name"], "url": wanted["url"], "status": None, "ok": False, "detail": ""}
    body = None if wanted["body"] is None else wanted["body"].encode("utf-8")
    headers = {"Content-Type": "application/json"} if body is not None else {}
    request = urllib.request.Request(wanted["url"], data=body, method=wanted["method"], headers=headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _no_redirect(urllib.request))
    try:
        with opener.open(request, timeout=wanted["timeout_s"]) as answer:
            result["status"] = int(answer.status)
            text = answer.read(BODY_LIMIT).decode("utf-8", "replace")
    except urllib.error.HTTPError as error:
        result["status"], text = int(error.code), ""
        error.close()
    except (OSError, http.client.HTTPException, ValueError) as error:
        text = ""
        result["detail"] = f"{type(error).__name__}: {error}"[:200]
    result["elapsed_ns"] = clock.monotonic_ns() - started
    return _judge(result, wanted, text)


def _no_redirect(module: Any) -> Any:
    class NoRedirect(module.HTTPRedirectHandler):  # type: ignore[misc]
        """Refuses every redirect."""

        def redirect_request(self, *_: object) -> None:
            """Answer: do not follow."""

    return NoRedirect


def _judge(result: Json, wanted: Json, text: str) -> Json:
    status_fits = result["status"] == wanted["expect_status"]
    contains = wanted["expect_contains"] is None or wanted["expect_contains"] in text
    result["ok"] = bool(status_fits and contains)
    if not result["detail"]:
        if not status_fits:
            result["detail"] = f"status {result['status']}, expected {wanted['expect_status']}"
        elif not contains:
            result["detail"] = "the expected text is not in the answer"
    return result
