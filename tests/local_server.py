"""A server of this machine that does what servers elsewhere do at times."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

DATA = bytes(range(256)) * 20000  # 5 MB


class Server(ThreadingHTTPServer):
    """Serves DATA under any name, or `errors` first; cuts connections after `cut` bytes so many times as `cuts`."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests, self.errors, self.cut, self.cuts, self.etag, self.data = [], [], 0, 0, '"1"', DATA
        self.stalls, self.ranged, self.length, self.redirect, self.status, self.encoding = False, None, None, None, 200, None
        self.url = f"http://127.0.0.1:{self.server_address[1]}/networks/a-1.0.pkl"

    def handle_error(self, *_):
        """Clients may hang up."""


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_GET(self):
        server, asked = self.server, self.headers.get("Range")
        server.requests.append(asked)
        if server.errors:
            return self.send_error(server.errors.pop(0))
        if server.redirect:
            self.send_response(302)
            self.send_header("Location", server.redirect)
            return self.end_headers()
        start = int(asked[6:-1]) if asked and self.headers.get("If-Range") == server.etag else 0
        if start >= len(server.data):
            return self.send_error(416)
        body = server.data[start:]
        cut = server.cuts > 0  # decided before the client hears anything: what it does next may change it
        server.cuts -= cut
        self.send_response(206 if start else server.status)
        if server.encoding:
            self.send_header("Content-Encoding", server.encoding)
        if server.length != "":
            self.send_header("Content-Length", server.length or str(len(body)))
        if start:
            self.send_header("Content-Range", server.ranged or f"bytes {start}-{len(server.data) - 1}/{len(server.data)}")
        if server.etag:
            self.send_header("ETag", server.etag)
        self.end_headers()
        if server.stalls:
            threading.Event().wait(3)
            return
        self.wfile.write(body[: server.cut] if cut else body)
