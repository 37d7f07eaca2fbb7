#!/usr/bin/env python3
"""A small client of the control API. Prints JSON lines; copy what you need.

    pip install -r requirements.txt
    ./client.py submit spec.yaml config.json tokenizer.json data.jsonl
    ./client.py --server box:7070 watch-evals --run sums-1 --after 17
    ./client.py --credentials DIR agents        # a closed fleet: `flotilla user create` makes credentials
"""
import argparse, json, os, pathlib, sys, tempfile, time

import grpc
import grpc_tools
from google.protobuf.json_format import MessageToDict
from grpc_tools import protoc

PROTO = pathlib.Path(__file__).resolve().parents[3] / "proto"
OPTIONS = [
    ("grpc.max_send_message_length", 64 << 20),
    ("grpc.max_receive_message_length", 16 << 20),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
]
RETRY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


def connect(server, credentials):
    """Opens a channel to the gateway of an open fleet, or of a closed fleet with credentials."""
    if credentials is None:
        return grpc.insecure_channel(server or "127.0.0.1:7070", options=OPTIONS)
    credentials = pathlib.Path(credentials)
    fleet = json.loads((credentials / "fleet.json").read_text())
    read = lambda name: (credentials / fleet["identity"][name]).read_bytes()
    tls = grpc.ssl_channel_credentials(root_certificates=read("ca"))
    bearer = grpc.access_token_call_credentials(read("bearer").decode().strip())
    # The address of the gateway may change. All servers of a fleet have this name in their
    # certificate.
    name = ("grpc.ssl_target_name_override", "fleet.flotilla.internal")
    both = grpc.composite_channel_credentials(tls, bearer)
    return grpc.secure_channel(server or fleet["gateway"], both, options=[*OPTIONS, name])


def stubs():
    """Generates the messages and service stubs from the .proto files, and imports them."""
    with tempfile.TemporaryDirectory() as out:
        well_known = pathlib.Path(grpc_tools.__file__).parent / "_proto"
        files = [str(path.relative_to(PROTO)) for path in PROTO.glob("flotilla/v1/*.proto")]
        flags = [f"-I{PROTO}", f"-I{well_known}", f"--python_out={out}", f"--grpc_python_out={out}"]
        if protoc.main(["protoc", *flags, *files]) != 0:
            sys.exit("the .proto files cannot be compiled")
        sys.path.insert(0, out)
        from flotilla.v1 import control_pb2, control_pb2_grpc
        return control_pb2, control_pb2_grpc


def show(message):
    names = {"preserving_proto_field_name": True}
    print(json.dumps(MessageToDict(message, **names)), flush=True)


def submit(pb, rpc, channel, args):
    spec = pathlib.Path(args.spec).read_text()
    files = {pathlib.Path(file).name: pathlib.Path(file).read_bytes() for file in args.files}
    request = pb.SubmitRequest(spec_yaml=spec, files=files)
    show(rpc.RunsStub(channel).Submit(request, timeout=120))


def wait(pb, rpc, channel, args):
    """Waits until the run has ended; exits with 1 unless it succeeded."""
    runs = rpc.RunsStub(channel)
    watch = lambda after: runs.Watch(pb.WatchRunRequest(run=args.run, after=after))
    for event in resume_stream(watch, 0):
        print(f"{event.cursor} {event.subject}", file=sys.stderr)
    run = runs.Get(pb.GetRunRequest(run=args.run), timeout=30)
    show(run)
    return 0 if run.state == pb.Run.SUCCEEDED else 1


def watch_evals(pb, rpc, channel, args):
    evals = rpc.EvalsStub(channel)
    filter = pb.EvalFilter(run=args.run, suite=args.suite)
    watch = lambda after: evals.Watch(pb.WatchEvalsRequest(filter=filter, after=after))
    for seen, event in enumerate(resume_stream(watch, args.after), start=1):
        show(event)
        if seen == args.count:
            return


def resume_stream(watch, cursor):
    """Yields the events of a stream and resumes at the last cursor after a lost connection."""
    failures = 0
    while True:
        try:
            for event in watch(cursor):
                cursor, failures = event.cursor, 0
                yield event
            return
        except grpc.RpcError as error:
            failures += 1
            if error.code() not in RETRY or failures > 30:
                raise
            time.sleep(min(failures, 5) * 0.2)


def agents(pb, rpc, channel, args):
    for agent in rpc.FleetStub(channel).Agents(pb.AgentsRequest(), timeout=30).agents:
        show(agent)


def download(pb, rpc, channel, args):
    """Downloads a file of a run's best checkpoint. OUT is either complete and verified or absent."""
    request = pb.DownloadRequest(checkpoint=pb.CheckpointRef(run=args.run), path=args.file)
    partial = f"{args.out}.partial"
    try:
        with open(partial, "wb") as out:
            for chunk in rpc.CheckpointsStub(channel).Download(request):
                out.write(chunk.data)
        os.replace(partial, args.out)
    finally:
        pathlib.Path(partial).unlink(missing_ok=True)


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--server", default=os.environ.get("FLOTILLA_GATEWAY"), help="host:port")
    parser.add_argument("--credentials", help="directory of a closed fleet's member")
    commands = parser.add_subparsers(required=True)

    def command(name, run, *positional):
        sub = commands.add_parser(name, help=run.__doc__)
        sub.set_defaults(call=run)
        for argument in positional:
            sub.add_argument(argument)
        return sub

    command("submit", submit, "spec").add_argument("files", nargs="*")
    command("wait", wait, "run")
    evals = command("watch-evals", watch_evals)
    evals.add_argument("--run", default="", help="only this run")
    evals.add_argument("--suite", default="", help="only this suite")
    evals.add_argument("--after", type=int, default=0, help="the last cursor seen")
    evals.add_argument("--count", type=int, help="stop after this number of evals")
    command("agents", agents)
    command("download", download, "run", "file", "out")
    return parser.parse_args()


def main():
    args = parse()
    pb, rpc = stubs()
    with connect(args.server, args.credentials) as channel:
        try:
            return args.call(pb, rpc, channel, args)
        except grpc.RpcError as error:
            print(f"{error.code().name}: {error.details()}", file=sys.stderr)
            return 1


if __name__ == "__main__":
    sys.exit(main())
