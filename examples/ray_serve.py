"""The server as a Ray Serve application of up to four replicas: `serve run examples.ray_serve:app`, or this file as it is."""

import json
import tempfile
import urllib.request
from functools import partial
from pathlib import Path

import ray
from ray import serve

from kvthaw.serve.build import build
from kvthaw.serve.ray import NAME, application

if not ray.is_initialized():
    ray.init(include_dashboard=False)
sizes = {"max_seqs": 4, "max_waiting": 16}
folder = Path(tempfile.gettempdir(), "kvthaw-documents")  # better on storage that all machines of the cluster share
gpus = min(1, ray.cluster_resources().get("GPU", 0))
app = application(
    partial(build, "shipped", "icecache-digest", budget=256, max_len=4096, kv_dir=folder, **sizes),
    replicas=(1, 4),  # more than one while requests wait
    num_gpus=gpus,
    **sizes,
)

if __name__ == "__main__":
    serve.run(app, name=NAME)
    body = {
        "prompt": "The pass key is 12345. Remember it. What is the pass key? The pass key is",
        "max_tokens": 8,
        "temperature": 0,
    }
    headers = {"Content-Type": "application/json", "x-session-id": "a user"}  # what follows it goes to the same replica
    request = urllib.request.Request("http://127.0.0.1:8000/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as answer:
        print(f"replica {answer.headers['x-replica-id']}: {json.load(answer)['choices'][0]['text']}")
    serve.shutdown()
