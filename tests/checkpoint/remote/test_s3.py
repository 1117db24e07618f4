"""The protocol of S3, as moto's server speaks it: s3fs against it, with multipart uploads."""

import shutil

import pytest
import torch
from fsspec.config import conf

from overlapkit.checkpoint import Checkpointer, list_checkpoints
from overlapkit.checkpoint.remote import store as store_module
from tests.checkpoint.faults import read_value, value_state

pytest.importorskip("s3fs", reason="pip install s3fs")
server = pytest.importorskip("moto.server", reason="pip install 'moto[server]'")

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs
URL = "s3://bucket/run"


@pytest.fixture(scope="module")
def s3():
    """A client of a server with a bucket; fsspec's configuration leads to it."""
    import boto3

    running = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    options = {"endpoint_url": f"http://{host}:{port}", "key": "k", "secret": "s"}
    conf["s3"] = options
    client = boto3.client(
        "s3",
        endpoint_url=options["endpoint_url"],
        aws_access_key_id="k",
        aws_secret_access_key="s",
        region_name="us-east-1",
    )
    client.create_bucket(Bucket="bucket")
    yield client
    conf.pop("s3")
    running.stop()


@pytest.fixture(autouse=True)
def empty_bucket(s3):
    for entry in s3.list_objects_v2(Bucket="bucket").get("Contents", []):
        s3.delete_object(Bucket="bucket", Key=entry["Key"])


def big(value):
    return {"t": torch.full((5 << 20,), float(value)), "n": value}


@pytest.mark.parametrize("tier", ["direct", "local"])
def test_saves_arrive_and_come_back(s3, tmp_path, monkeypatch, tier):
    monkeypatch.setattr(store_module, "_BLOCK", 6 << 20)
    local = {"local": tmp_path / "local"} if tier == "local" else {}
    with Checkpointer(URL, keep=2, **local) as checkpointer:
        for step in (1, 2, 3, 3):
            checkpointer.save(step, big(step * 10))
            checkpointer.wait()
        assert checkpointer.steps() == [2, 3]
    if tier == "direct":  # an ETag with a number after a dash is that of so many parts
        entries = s3.list_objects_v2(Bucket="bucket")["Contents"]
        etags = [entry["ETag"] for entry in entries if entry["Key"].endswith("safetensors")]
        assert all(int(etag.strip('"').partition("-")[2]) > 1 for etag in etags)
    shutil.rmtree(tmp_path / "local", ignore_errors=True)
    state = big(0)
    with Checkpointer(URL, **local) as checkpointer:
        assert checkpointer.restore(state) == 3
        checkpointer.verify(2)
    assert state["n"] == 30
    assert torch.equal(state["t"], torch.full((5 << 20,), 30.0))
    keys = [entry["Key"] for entry in s3.list_objects_v2(Bucket="bucket")["Contents"]]
    assert len(keys) == 6
    assert {key.split("/")[1] for key in keys} == {"step-2", "step-3"}
    assert [one.state for one in list_checkpoints(URL, check=True)] == ["verified", "verified"]


def test_another_process_sees_what_this_one_did_not_write(s3):
    """No listing is kept from before."""
    with Checkpointer(URL) as checkpointer:
        assert checkpointer.steps() == []
        checkpointer.save(1, value_state(1), block=True)
        for entry in s3.list_objects_v2(Bucket="bucket")["Contents"]:
            source = {"Bucket": "bucket", "Key": entry["Key"]}
            s3.copy_object(Bucket="bucket", CopySource=source, Key="other/" + entry["Key"])
            s3.delete_object(Bucket="bucket", Key=entry["Key"])
        assert checkpointer.steps() == []
    assert read_value("s3://bucket/other/run") == (1, 1)


def test_a_bucket_that_is_not_there_is_an_error_and_is_not_made(s3):
    with pytest.raises(PermissionError, match="'s3://nowhere/run' cannot be read, written to"):
        Checkpointer("s3://nowhere/run")
    with pytest.raises(PermissionError, match="'s3://nowhere/run' cannot be read, written to"):
        Checkpointer("s3://nowhere/run", local="/tmp")
    assert [bucket["Name"] for bucket in s3.list_buckets()["Buckets"]] == ["bucket"]
