"""Two replicas behind Ray Serve: conversations go to who knows them, and outlive everybody who did."""

import socket
import time

import httpx
import openai
import pytest

import mambakit as mk
from mambakit.text.tokens import Bytes
from trainer_cases import make_model

pytest.importorskip("ray", reason="an extra: pip install mambakit[ray]")
pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own


@pytest.fixture(scope="module")
def cluster():
    import ray
    from ray import serve

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    yield f"http://127.0.0.1:{port}"
    serve.shutdown()
    ray.shutdown()


def test_two_replicas(cluster, tmp_path):
    from ray import serve

    from mambakit.serving.ray import REPLICA, application

    folder, sessions = tmp_path / "tiny", tmp_path / "sessions"
    mk.save_model(make_model(), folder)
    Bytes().save(folder)
    made = application(folder, sessions=sessions, keys=["key"], actor_options={"num_cpus": 0}, threads=1)
    headers = {"Authorization": "Bearer key"}

    def asked(**fields):
        body = {"max_output_tokens": 6, "temperature": 0, **fields}
        answer = httpx.post(f"{cluster}/v1/responses", json=body, headers=headers, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.headers[REPLICA], answer.json()

    serve.run(made)
    first = [asked(input=f"number {number}") for number in range(8)]
    assert len({replica for replica, _ in first}) == 2, "both work"
    time.sleep(2)  # until Ray has heard who has what
    for _ in range(2):
        for replica, response in first:
            again, then = asked(input="and", previous_response_id=response["id"])
            assert again == replica
            assert then["usage"]["input_tokens_details"]["cached_tokens"] > response["usage"]["input_tokens"]

    with openai.OpenAI(base_url=f"{cluster}/v1", api_key="key", max_retries=0) as client:
        talk = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9, "seed": 1}
        whole = client.chat.completions.create(**talk).choices[0].message.content
        chunks = list(client.chat.completions.create(**talk, stream=True))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole
        assert len(chunks) > 4
        with pytest.raises(openai.BadRequestError, match="max_tokens is -1"):
            client.chat.completions.create(**{**talk, "max_tokens": -1})
    assert httpx.get(f"{cluster}/v1/models").status_code == 401

    serve.run(application(folder, sessions=sessions, keys=["key"], actor_options={"num_cpus": 0}, threads=1))
    others = {replica for replica, _ in first}
    for _, response in first[:3]:
        replica, then = asked(input="and", previous_response_id=response["id"])
        assert replica not in others
        assert then["usage"]["input_tokens_details"]["cached_tokens"] > response["usage"]["input_tokens"]
