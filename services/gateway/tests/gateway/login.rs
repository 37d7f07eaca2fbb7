//! Login codes: one-time links to the page, over HTTP as a browser and as attackers use it.

use identity::{MemberKind, MemberRole, UserScope};
use reqwest::{RequestBuilder, StatusCode};
use serde_json::{Value, json};
use wire::v1;

use crate::closed::{Closed, now};

const EXCHANGE: &str = "/flotilla.v1.Members/ExchangeLoginCode";

/// Sends a request and returns its status and the JSON of the answer, if it is JSON.
async fn send(request: RequestBuilder) -> (StatusCode, Value) {
    let answer = request.send().await.unwrap();
    let status = answer.status();
    (status, serde_json::from_str(&answer.text().await.unwrap()).unwrap_or_default())
}

/// Exchanges a code as the gateway's page does.
async fn exchange(fleet: &Closed, code: &str) -> (StatusCode, Value) {
    let (client, origin) = fleet.http_client();
    let request = client.post(format!("{origin}{EXCHANGE}")).header("origin", &origin);
    let request = request.header("content-type", "application/json");
    send(request.body(json!({ "code": code }).to_string())).await
}

/// Calls a method with an empty message and a bearer.
async fn call(fleet: &Closed, method: &str, bearer: &str) -> (StatusCode, Value) {
    let (client, origin) = fleet.http_client();
    let request = client.post(format!("{origin}/flotilla.v1.{method}")).bearer_auth(bearer);
    send(request.header("content-type", "application/json").body("{}")).await
}

async fn create_code(fleet: &Closed, bearer: &str) -> String {
    fleet.client(Some(bearer)).await.create_login_code().await.unwrap().code
}

#[tokio::test]
async fn a_code_signs_in_once_as_its_caller_and_for_half_a_day() {
    let fleet = Closed::start().await;
    // One of the fleet's own members, whose bearer has no end.
    let olga = fleet.bearer("olga", UserScope::Operator);
    let made = fleet.client(Some(&olga)).await.create_login_code().await.unwrap();
    let left = made.expires_at.unwrap().seconds - i64::try_from(now().as_secs()).unwrap();
    assert!((1..=600).contains(&left), "{left}");
    assert!(made.code.len() >= 32, "192 bits");
    let (status, session) = exchange(&fleet, &made.code).await;
    assert_eq!(status, StatusCode::OK, "{session}");
    let session = session["bearer"].as_str().unwrap();
    assert_ne!(session, olga);
    let (status, hello) = call(&fleet, "Fleet/Hello", session).await;
    assert_eq!(status, StatusCode::OK, "{hello}");
    assert_eq!((&hello["name"], &hello["scope"]), (&json!("olga"), &json!("operator")));
    assert_eq!(call(&fleet, "Runs/List", session).await.0, StatusCode::OK);
    // It may no more than its caller.
    assert_eq!(call(&fleet, "Members/ListTokens", session).await.0, StatusCode::FORBIDDEN);
    let claims = session.split('.').nth(1).unwrap();
    let claims = data_encoding::BASE64URL_NOPAD.decode(claims.as_bytes()).unwrap();
    let claims: Value = serde_json::from_slice(&claims).unwrap();
    let lasts = claims["exp"].as_u64().unwrap() - claims["iat"].as_u64().unwrap();
    assert_eq!(lasts, 12 * 3600);
    let (status, error) = exchange(&fleet, &made.code).await;
    assert_eq!(status, StatusCode::UNAUTHORIZED, "it was used: {error}");
    assert!(error["message"].as_str().unwrap().contains("flotilla open"), "{error}");
    assert_eq!(error["details"][0]["debug"]["reason"], "K120", "{error}");
}

#[tokio::test]
async fn only_users_who_may_see_the_page_make_codes() {
    let fleet = Closed::start().await;
    let agent =
        MemberKind::Agent { roles: [MemberRole::Trainer].into(), pool: "default".parse().unwrap() };
    let denied = [
        (fleet.bearer_until("box-3", agent, None), StatusCode::FORBIDDEN),
        (fleet.bearer("carl", UserScope::Client), StatusCode::FORBIDDEN),
        ("nonsense".into(), StatusCode::UNAUTHORIZED),
    ];
    for (bearer, expected) in denied {
        let (status, error) = call(&fleet, "Members/CreateLoginCode", &bearer).await;
        assert_eq!(status, expected, "{error}");
    }
    let ended = Some(now().as_secs() - 5);
    let expired = fleet.bearer_until("ann", MemberKind::User { scope: UserScope::Reader }, ended);
    let (status, error) = call(&fleet, "Members/CreateLoginCode", &expired).await;
    assert_eq!(status, StatusCode::UNAUTHORIZED, "{error}");
    create_code(&fleet, &fleet.bearer("rita", UserScope::Reader)).await;
}

#[tokio::test]
async fn a_session_ends_with_the_bearer_and_the_membership_of_its_caller() {
    let fleet = Closed::start().await;
    let request = v1::CreateUserRequest {
        name: "rita".into(),
        public_key: fleet.identity("rita").ensure_public_key().unwrap(),
        scope: "reader".into(),
        expires_in_s: 3600.0,
    };
    let rita = fleet.admin().await.create_user(request).await.unwrap();
    let (_, session) = exchange(&fleet, &create_code(&fleet, &rita.bearer).await).await;
    let session = session["bearer"].as_str().unwrap().to_owned();
    let end = |bearer: &str| {
        let claims = data_encoding::BASE64URL_NOPAD
            .decode(bearer.split('.').nth(1).unwrap().as_bytes())
            .unwrap();
        serde_json::from_slice::<Value>(&claims).unwrap()["exp"].as_u64().unwrap()
    };
    assert_eq!(end(&session), end(&rita.bearer));
    assert_eq!(call(&fleet, "Runs/List", &session).await.0, StatusCode::OK);
    let unused = create_code(&fleet, &rita.bearer).await;
    fleet.admin().await.revoke_member("rita").await.unwrap();
    let (status, error) = call(&fleet, "Runs/List", &session).await;
    assert_eq!(status, StatusCode::UNAUTHORIZED, "{error}");
    // Neither does a code that she had before.
    let (_, late) = exchange(&fleet, &unused).await;
    let (status, error) = call(&fleet, "Runs/List", late["bearer"].as_str().unwrap()).await;
    assert_eq!(status, StatusCode::UNAUTHORIZED, "{error}");
    assert!(error["message"].as_str().unwrap().contains("revoked"), "{error}");
}

#[tokio::test]
async fn a_code_is_not_taken_from_another_page_a_form_or_an_address() {
    let fleet = Closed::start().await;
    let code = create_code(&fleet, &fleet.bearer("ada", UserScope::Admin)).await;
    let (client, origin) = fleet.http_client();
    let body = json!({ "code": code }).to_string();
    for foreign in ["https://evil.example", "null", "https://127.0.0.1:1"] {
        let request = client.post(format!("{origin}{EXCHANGE}")).header("origin", foreign);
        let request = request.header("content-type", "application/json");
        let (status, error) = send(request.body(body.clone())).await;
        assert_eq!(status, StatusCode::FORBIDDEN, "{foreign}: {error}");
    }
    // In forms that browsers send without asking the gateway: a form, and a link.
    for kind in ["text/plain", "application/x-www-form-urlencoded"] {
        let request = client.post(format!("{origin}{EXCHANGE}")).header("content-type", kind);
        // Read as a gRPC call, whose message this is not.
        let (_, answer) = send(request.body(body.clone())).await;
        assert!(answer["bearer"].is_null(), "{kind}: {answer}");
    }
    let (_, answer) = send(client.get(format!("{origin}{EXCHANGE}?code={code}"))).await;
    assert!(answer["bearer"].is_null(), "{answer}");
    let (status, _) = exchange(&fleet, &code).await;
    assert_eq!(status, StatusCode::OK, "none of these used it up");
}

#[tokio::test]
async fn a_client_that_guesses_codes_is_slowed_down() {
    let fleet = Closed::start().await;
    let code = create_code(&fleet, &fleet.bearer("ada", UserScope::Admin)).await;
    let guesses = [String::new(), code.to_lowercase(), format!("{code} "), code[1..].to_owned()];
    let mut statuses = Vec::new();
    for guess in guesses.iter().cycle().take(40) {
        statuses.push(exchange(&fleet, guess).await.0);
    }
    assert!(statuses[..30].iter().all(|status| *status == StatusCode::UNAUTHORIZED));
    assert!(statuses.contains(&StatusCode::TOO_MANY_REQUESTS), "{statuses:?}");
    // Members are not slowed down by a guesser.
    fleet.admin().await.list_members().await.unwrap();
}
