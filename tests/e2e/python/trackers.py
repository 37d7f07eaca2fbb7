"""Reads runs from experiment trackers with their own packages.

Reads a JSON list from each line of stdin, and prints {"result": …} or {"error": "…"}:

    ["mlflow", URL, EXPERIMENT]
    ["experiment", URL, NAME]          the experiment id
    ["forget", URL, EXPERIMENT]        deletes the cursors of feeds
    ["traces", URL, EXPERIMENT]        [[name, name of the parent, status], …] per trace
    ["tensorboard", URL]
    ["trackio", PROJECT]               in TRACKIO_DIR

    trackers.py serve-trackio PORT     runs until stdin ends; prints its write token

The result for a tracker is
{run: {"name", "status", "settings", "figures": {key: [[step, value], …]}}}; fields that a tracker
does not store are absent.
"""

import json
import sys
import urllib.parse
import urllib.request


def mlflow(url, experiment):
    from mlflow import MlflowClient

    client = MlflowClient(url)
    found = client.get_experiment_by_name(experiment)
    runs = {}
    for run in client.search_runs([found.experiment_id]) if found else []:
        history = {
            key: [[point.step, point.value] for point in client.get_metric_history(run.info.run_id, key)]
            for key in run.data.metrics
        }
        name = run.data.tags["flotilla.run"]
        assert name not in runs, f"{name} is there twice"
        runs[name] = {
            "name": run.info.run_name,
            "status": run.info.status,
            "settings": run.data.params,
            "figures": history,
        }
    return runs


def forget(url, name):
    """Deletes the cursors, as if the feed had been killed before it wrote them."""
    from mlflow import MlflowClient

    client = MlflowClient(url)
    for run in client.search_runs([experiment(url, name)]):
        client.delete_tag(run.info.run_id, "flotilla.cursor")
    return "forgotten"


def experiment(url, name):
    from mlflow import MlflowClient

    return MlflowClient(url).get_experiment_by_name(name).experiment_id


def traces(url, experiment):
    from mlflow import MlflowClient

    client = MlflowClient(url)
    number = client.get_experiment_by_name(experiment).experiment_id
    found = []
    for trace in client.search_traces(locations=[number]):
        names = {span.span_id: span.name for span in trace.data.spans}
        found.append([[it.name, names.get(it.parent_id), it.status.status_code] for it in trace.data.spans])
    return found


def tensorboard(url):
    def ask(path, **query):
        place = f"{url}/data/plugin/scalars/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(place) as answer:
            return json.load(answer)

    return {
        run: {
            "figures": {
                tag: [[step, value] for _, step, value in ask("scalars", run=run, tag=tag)]
                for tag in tags
            }
        }
        for run, tags in ask("tags").items()
    }


def trackio(project):
    from trackio.sqlite_storage import SQLiteStorage

    runs = {}
    configs = SQLiteStorage.get_all_run_configs(project)
    for record in SQLiteStorage.get_run_records(project):
        figures = {}
        for entry in SQLiteStorage.get_logs(project, record["name"], run_id=record["id"]):
            for key, value in entry.items():
                if "/" in key:
                    figures.setdefault(key, []).append([entry["step"], value])
        config = configs.get(record["id"]) or configs.get(record["name"]) or {}
        runs[record["id"]] = {"name": record["name"], "settings": config, "figures": figures}
    return runs


def serve_trackio(port):
    import trackio as package
    from trackio import server

    package.show(open_browser=False, block_thread=False, host="127.0.0.1", server_port=int(port))
    print(server.write_token, flush=True)
    sys.stdin.read()


COMMANDS = {it.__name__: it for it in (mlflow, experiment, forget, traces, tensorboard, trackio)}


def answer(line):
    command, *arguments = json.loads(line)
    try:
        return {"result": COMMANDS[command](*arguments)}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


if sys.argv[1:2] == ["serve-trackio"]:
    serve_trackio(*sys.argv[2:])
else:
    for line in sys.stdin:
        print(json.dumps(answer(line)), flush=True)
