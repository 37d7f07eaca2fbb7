//! The services as JSON, over HTTP/1.1 as curl and browsers use it, and over HTTP/2.

use futures::StreamExt;
use prost::Message;
use reqwest::{Client, StatusCode};
use serde_json::{Value, json};
use tokio::time::timeout;
use tonic_types::StatusExt;

use crate::rig::{PATIENCE, Rig, SPEC};

fn url(rig: &Rig, method: &str) -> String {
    format!("{}/flotilla.v1.{method}", rig.url)
}

fn client() -> Client {
    bounded_http::client_builder().build().unwrap()
}

async fn call(rig: &Rig, method: &str, body: &Value) -> (StatusCode, Value) {
    let asked = client().post(url(rig, method)).header("content-type", "application/json");
    let answer = timeout(PATIENCE, asked.body(body.to_string()).send()).await.unwrap().unwrap();
    assert_eq!(answer.headers()["content-type"], "application/json");
    (answer.status(), serde_json::from_str(&answer.text().await.unwrap()).unwrap())
}

fn submission() -> Value {
    let files = [
        ("config.json", "{}"),
        ("tokenizer.json", "{}"),
        ("held.txt", "two and two are four"),
        ("data.jsonl", r#"{"prompt": "2+2=", "completion": "4"}"#),
    ];
    let files: serde_json::Map<String, Value> = files
        .map(|(name, text)| (name.into(), BASE64.encode(text.as_bytes()).into()))
        .into_iter()
        .collect();
    json!({ "specYaml": SPEC, "files": files })
}

const BASE64: data_encoding::Encoding = data_encoding::BASE64;

#[tokio::test]
async fn a_run_is_submitted_shown_and_steered_as_by_grpc() {
    let rig = Rig::start().await;
    let (status, submitted) = call(&rig, "Runs/Submit", &submission()).await;
    assert_eq!(status, StatusCode::OK, "{submitted}");
    let run = submitted["run"].as_str().unwrap();
    let (_, shown) = call(&rig, "Runs/Get", &json!({ "run": run })).await;
    let grpc = rig.runs().get(wire::v1::GetRunRequest { run: run.into() }).await.unwrap();
    let grpc = serde_json::to_value(grpc.into_inner()).unwrap();
    // The library chooses between two formats of a time.
    let without_time =
        |mut run: Value| run.as_object_mut().unwrap().remove("submittedAt").map(|_| run);
    assert_eq!(without_time(shown), without_time(grpc), "one JSON everywhere");
    let pause = json!({ "run": run, "reason": "a game" });
    assert_eq!(call(&rig, "Runs/Pause", &pause).await, (StatusCode::OK, json!({})));
    let (_, listed) = call(&rig, "Runs/List", &json!({})).await;
    assert_eq!(listed["runs"][0]["state"], "PAUSED");
}

#[tokio::test]
async fn an_unknown_path_of_the_api_for_models_is_not_found() {
    let rig = Rig::start().await;
    for path in ["/v1/embeddings", "/v1/models/stable"] {
        let asked = client().post(format!("{}{path}", rig.url)).body("{}").send();
        let answer = timeout(PATIENCE, asked).await.unwrap().unwrap();
        assert_eq!(answer.status(), StatusCode::NOT_FOUND);
        let error: Value = serde_json::from_str(&answer.text().await.unwrap()).unwrap();
        let message = error["error"]["message"].as_str().unwrap();
        assert!(message.starts_with(&format!("there is no {path}")), "{message}");
    }
}

/// lm_eval looks for a tokenizer at this path, and reads each answer of the status 200 as JSON.
#[tokio::test]
async fn an_unknown_path_is_an_error_in_the_protocol_of_the_request() {
    let rig = Rig::start().await;
    for (kind, expected) in [
        ("text/plain", StatusCode::NOT_FOUND),
        ("application/json", StatusCode::NOT_IMPLEMENTED),
        ("application/grpc", StatusCode::OK),
    ] {
        let url = format!("{}/tokenizer_info", rig.url);
        let asked = client().get(url).header("content-type", kind).send();
        let answer = timeout(PATIENCE, asked).await.unwrap().unwrap();
        assert_eq!(answer.status(), expected, "{kind}");
        let unimplemented = answer.headers().get("grpc-status").is_some_and(|code| code == "12");
        assert_eq!(unimplemented, expected == StatusCode::OK, "{kind}");
    }
}

#[tokio::test]
async fn what_cannot_be_done_has_a_code_a_reason_and_its_http_status() {
    let rig = Rig::start().await;
    let run = rig.submit().await;
    let (status, error) = call(&rig, "Runs/Get", &json!({ "run": "r-none-0000" })).await;
    assert_eq!((status, &error["code"]), (StatusCode::NOT_FOUND, &json!("not_found")), "{error}");
    assert_eq!(error["details"][0]["debug"], json!({ "reason": "R101", "domain": "flotilla" }));
    let unknown = wire::v1::GetRunRequest { run: "r-none-0000".into() };
    let refused = rig.runs().get(unknown).await.unwrap_err();
    let told = refused.get_details_error_info().expect("why, for programs");
    assert_eq!((&*told.reason, &*told.domain), ("R101", "flotilla"));
    assert_eq!(refused.message(), error["message"]);
    for wrong in [json!({ "rum": run }), json!({ "run": 7 }), json!([run])] {
        let (status, error) = call(&rig, "Runs/Get", &wrong).await;
        assert_eq!(status, StatusCode::BAD_REQUEST, "{wrong}");
        let message = error["message"].as_str().unwrap();
        assert!(message.contains("GetRunRequest"), "{message}");
    }
    let (_, unknown) = call(&rig, "Runs/Get", &json!({ "rum": run })).await;
    assert!(unknown["message"].as_str().unwrap().contains("rum"), "{unknown}");
    let (status, error) = call(&rig, "Runs/Erase", &json!({})).await;
    assert_eq!(status, StatusCode::NOT_IMPLEMENTED, "{error}");
    let long = json!({ "run": "r".repeat(80_000) });
    assert_eq!(call(&rig, "Runs/Get", &long).await.0, StatusCode::TOO_MANY_REQUESTS);
    let mut many = submission();
    many["files"] = (0..1001).map(|number| (format!("{number}"), json!(""))).collect();
    let (status, error) = call(&rig, "Runs/Submit", &many).await;
    assert_eq!(status, StatusCode::TOO_MANY_REQUESTS, "{error}");
    let message = error["message"].as_str().unwrap();
    assert!(message.contains("more than 1000 files"), "{message}");
    rig.finish(&run).await;
    let (status, error) = call(&rig, "Runs/Cancel", &json!({ "run": run })).await;
    assert_eq!((status, &error["code"]), (StatusCode::BAD_REQUEST, &json!("failed_precondition")));
}

#[tokio::test]
async fn the_description_has_every_call_and_answers_are_as_it_says() {
    let rig = Rig::start().await;
    let described = client().get(format!("{}/openapi.json", rig.url)).send().await.unwrap();
    assert_eq!(described.headers()["content-type"], "application/json");
    let described: Value = serde_json::from_str(&described.text().await.unwrap()).unwrap();
    let paths = described["paths"].as_object().unwrap();
    let services = prost_types::FileDescriptorSet::decode(wire::FILE_DESCRIPTOR_SET).unwrap();
    let methods = services.file.iter().flat_map(|file| &file.service);
    assert_eq!(paths.len(), methods.map(|service| service.method.len()).sum::<usize>());
    assert_eq!(
        paths["/flotilla.v1.Runs/Pause"]["post"]["requestBody"]["content"]["application/json"],
        json!({ "schema": { "$ref": "#/components/schemas/flotilla.v1.ControlRequest" } }),
    );

    let run = rig.submit().await;
    let (_, mut shown) = call(&rig, "Runs/Get", &json!({ "run": run })).await;
    let schema = json!({
        "$ref": "#/components/schemas/flotilla.v1.Run",
        "components": described["components"],
    });
    let schema = jsonschema::validator_for(&schema).unwrap();
    schema.validate(&shown).expect("an answer is what was described");
    for (field, wrong) in [("state", json!("RUNING")), ("submittedAt", json!(7))] {
        let right = std::mem::replace(&mut shown[field], wrong);
        assert!(schema.validate(&shown).is_err(), "{field} is not described");
        shown[field] = right;
    }
}

#[tokio::test]
async fn a_stream_is_a_line_for_each_message_as_they_come() {
    let rig = Rig::start().await;
    let run = rig.submit().await;
    let asked = client().post(url(&rig, "Runs/Watch"));
    let asked = asked.header("content-type", "application/json");
    let answer = asked.body(json!({ "run": run }).to_string()).send().await.unwrap();
    assert_eq!(answer.headers()["content-type"], "application/x-ndjson");
    let mut pieces = answer.bytes_stream();
    let mut text = Vec::new();
    let mut lines = async |count: usize| -> Vec<Value> {
        while text.iter().filter(|byte| **byte == b'\n').count() < count {
            match timeout(PATIENCE, pieces.next()).await.expect("the stream is silent") {
                Some(piece) => text.extend(piece.unwrap()),
                None => break,
            }
        }
        let lines = text.split(|byte| *byte == b'\n').filter(|line| !line.is_empty());
        lines.map(|line| serde_json::from_slice(line).unwrap()).collect()
    };
    assert_eq!(lines(1).await[0]["subject"], format!("flotilla.{run}.spec"));
    rig.publish_eval(&run, 1).await;
    assert_eq!(lines(2).await[1]["subject"], format!("flotilla.{run}.eval.1.1.held"));
    rig.finish(&run).await;
    let all = lines(usize::MAX).await;
    assert_eq!(all.len(), 3, "it ends with the run: {all:?}");
}

/// Returns the messages of a Connect stream, and its end message.
fn opened(mut sealed: &[u8]) -> (Vec<Value>, Value) {
    let mut messages = Vec::new();
    loop {
        let (head, rest) = sealed.split_first_chunk::<5>().expect("an envelope");
        let length = u32::from_be_bytes(head[1..].try_into().unwrap()) as usize;
        let message = serde_json::from_slice(&rest[..length]).unwrap();
        sealed = &rest[length..];
        if head[0] == 2 {
            assert!(sealed.is_empty(), "nothing follows the end");
            return (messages, message);
        }
        messages.push(message);
    }
}

#[tokio::test]
async fn connect_s_clients_have_streams_in_envelopes_and_their_errors_at_the_end() {
    let rig = Rig::start().await;
    let run = rig.submit().await;
    rig.finish(&run).await;
    let client = bounded_http::client_builder().http2_prior_knowledge().build().unwrap();
    let ask = async |method: &str, body: Value, timeout_ms: &str| {
        let text = body.to_string();
        let sealed = [&[0][..], &(text.len() as u32).to_be_bytes(), text.as_bytes()].concat();
        let asked = client.post(url(&rig, method)).header("connect-timeout-ms", timeout_ms);
        let asked = asked.header("content-type", "application/connect+json").body(sealed);
        let answer = timeout(PATIENCE, asked.send()).await.unwrap().unwrap();
        assert_eq!(answer.status(), StatusCode::OK);
        assert_eq!(answer.headers()["content-type"], "application/connect+json");
        opened(&timeout(PATIENCE, answer.bytes()).await.unwrap().unwrap())
    };
    let (events, end) = ask("Runs/Watch", json!({ "run": run }), "60000").await;
    assert_eq!((events.len(), end), (2, json!({})));
    let (none, end) = ask("Runs/Watch", json!({ "run": "r-none-0000" }), "60000").await;
    assert_eq!((none.len(), &end["error"]["code"]), (0, &json!("not_found")));
    let (_, end) = ask("Evals/Watch", json!({}), "300").await;
    assert_eq!(end["error"]["code"], "deadline_exceeded");
    let (_, end) = ask("Runs/Get", json!({ "run": run }), "60000").await;
    assert_eq!(end["error"]["code"], "invalid_argument", "it has one answer");
}

#[tokio::test]
async fn pages_of_others_may_not_call() {
    let rig = Rig::start().await;
    let ask = async |origin: &str| {
        let asked = client().post(url(&rig, "Runs/List")).header("origin", origin);
        let asked = asked.header("content-type", "application/json");
        asked.body("{}").send().await.unwrap().status()
    };
    assert_eq!(ask(&rig.url).await, StatusCode::OK);
    assert_eq!(ask("http://evil.example").await, StatusCode::FORBIDDEN);
    // DNS rebinding: a public name that points to this gateway.
    let asked = client().post(url(&rig, "Runs/List")).header("host", "evil.example");
    let asked = asked.header("origin", "http://evil.example").bearer_auth("anything");
    let asked = asked.header("content-type", "application/json").body("{}");
    assert_eq!(asked.send().await.unwrap().status(), StatusCode::FORBIDDEN);
    // A browser sends this content type without a preflight request.
    let plain = client().post(url(&rig, "Runs/List")).header("content-type", "text/plain");
    let refused = plain.body("{}").send().await.unwrap();
    assert_ne!(refused.headers()["content-type"], "application/json");
    // gRPC over HTTP/1.1 is denied too.
    let grpc = client().post(url(&rig, "Runs/List")).header("origin", "http://evil.example");
    let grpc = grpc.header("content-type", "application/grpc").body(vec![0; 5]);
    assert_eq!(grpc.send().await.unwrap().status(), StatusCode::FORBIDDEN);
}
