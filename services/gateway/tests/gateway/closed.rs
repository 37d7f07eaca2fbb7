//! A closed fleet's gateway: permissions, expiry, rate limits and joining.

use std::{
    collections::BTreeSet,
    path::PathBuf,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use bus::{
    Bus, ConnectOptions,
    server::{ManagedServer, ServerOptions},
};
use control::{FleetControl, MemberRegistry, MembershipConfig};
use gateway::{
    Config, GatewayTls,
    client::{ClientError, GatewayTarget, MembershipClient, PinError, fetch_authority},
    rpc::{evals_client::EvalsClient, members_client::MembersClient, runs_client::RunsClient},
};
use identity::{
    CredentialFiles, Fingerprint, FleetAuthority, JoinToken, Member, MemberIdentity, MemberKind,
    MemberRole, MemberTokens, ProofPurpose, ProofStatement, UserScope,
};
use prost::Message;
use store::Store;
use tempfile::TempDir;
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    task::JoinSet,
    time::{Instant, timeout},
};
use tokio_util::sync::CancellationToken;
use tonic::{
    Code, Request, Status,
    codegen::http::uri::PathAndQuery,
    transport::{Certificate, Channel, ClientTlsConfig},
};
use tonic_health::pb::{HealthCheckRequest, health_client::HealthClient};
use wire::{AgentId, Fact, FactBody, FactKey, RunId, Subject, v1};

use crate::rig::PATIENCE;

pub(crate) struct Closed {
    address: String,
    ca_pem: String,
    keys: PathBuf,
    bus: Bus,
    dir: TempDir,
    nats: ManagedServer,
    stop: CancellationToken,
}

pub(crate) fn now() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap()
}

/// Creates the public key of a new user.
fn user_key() -> String {
    let directory = TempDir::new().unwrap();
    MemberIdentity::with_default_files("somebody")
        .resolve_in(directory.path())
        .ensure_public_key()
        .unwrap()
}

impl Closed {
    pub(crate) async fn start() -> Self {
        let dir = TempDir::new().unwrap();
        let keys = dir.path().join("keys");
        let (authority, _) =
            FleetAuthority::create_or_open(&keys, "test", &[], now().as_secs()).unwrap();
        let nats = dir.path().join("bus");
        let mut server = ServerOptions::new(&nats);
        let config = authority.nats_config(&nats.join("accounts"), now().as_secs()).unwrap();
        server.closed_fleet = Some(bus::server::ClosedFleetConfig {
            config,
            account: authority.account_public_key(),
        });
        let nats = ManagedServer::start(&server).await.unwrap();
        let coordinator = Member {
            name: AgentId::new("coordinator").unwrap(),
            standing: MemberKind::Coordinator,
        };
        let identity = MemberIdentity::with_default_files("coordinator")
            .resolve_in(&dir.path().join("coordinator"));
        let key = identity.ensure_public_key().unwrap();
        let MemberTokens { jwt, bearer } =
            authority.issue_tokens(&coordinator, &key, now().as_secs(), None).unwrap();
        let credentials = CredentialFiles { jwt: &jwt, bearer: &bearer, ca: authority.ca_pem() };
        identity.write_files(&credentials).unwrap();
        let options = ConnectOptions {
            urls: vec![nats.client_url()],
            identity: Some(identity),
            ..Default::default()
        };
        let bus = Bus::connect(&options).await.unwrap();
        bus.prepare_log(1).await.unwrap();
        bus.prepare_members(1).await.unwrap();
        let tls = GatewayTls {
            cert_pem: std::fs::read(authority.server_certificate_path()).unwrap(),
            key_pem: std::fs::read(authority.server_key_path()).unwrap(),
        };
        let config = Config { listen: "127.0.0.1:0".parse().unwrap(), tls: Some(tls) };
        let bound = gateway::bind_port(config).await.unwrap();
        let address = bound.local_address().to_string();
        let store = Store::open(&format!("file://{}/store", dir.path().display())).await.unwrap();
        let terms = MembershipConfig {
            keys_dir: keys.clone(),
            nats_servers: vec![nats.client_url()],
            advertised_nats: vec!["tls://127.0.0.1:1".into()],
            advertised_gateways: vec![address.clone()],
            store: store.url().to_owned(),
            member_ttl: Duration::from_secs(3600),
            lease: Duration::from_secs(60),
        };
        let members = MemberRegistry::new(bus.clone(), terms);
        let stop = CancellationToken::new();
        let control = FleetControl::with_store(bus.clone(), store);
        tokio::spawn(bound.with_members(members).serve_calls(control, stop.clone()));
        let ca_pem = authority.ca_pem().to_owned();
        let closed = Self { address, ca_pem, keys, bus, dir, nats, stop };
        closed.answers().await;
        closed
    }

    /// Waits until the gateway has loaded the members; before, it denies all calls.
    async fn answers(&self) {
        let began = Instant::now();
        let bearer = self.bearer("admin", UserScope::Admin);
        loop {
            let mut client = self.client(Some(&bearer)).await;
            match client.list_members().await {
                Ok(_) => return,
                Err(error) => {
                    assert!(began.elapsed() < PATIENCE && error.is_transient(), "{error}");
                }
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    pub(crate) fn bearer(&self, name: &str, scope: UserScope) -> String {
        // The fleet's own members have no records.
        self.bearer_until(name, MemberKind::User { scope }, None)
    }

    pub(crate) fn bearer_until(
        &self,
        name: &str,
        standing: MemberKind,
        until: Option<u64>,
    ) -> String {
        let member = Member { name: AgentId::new(name).unwrap(), standing };
        let issued = now().as_secs() - 10;
        let authority = FleetAuthority::open(&self.keys).unwrap();
        authority.issue_tokens(&member, &user_key(), issued, until).unwrap().bearer
    }

    fn target(&self, bearer: Option<&str>) -> GatewayTarget {
        GatewayTarget {
            addresses: vec![self.address.clone()],
            ca_pem: self.ca_pem.clone(),
            bearer: bearer.map(str::to_owned),
        }
    }

    async fn store(&self) -> Store {
        Store::open(&format!("file://{}/store", self.dir.path().display())).await.unwrap()
    }

    pub(crate) async fn client(&self, bearer: Option<&str>) -> MembershipClient {
        MembershipClient::connect_first(&self.target(bearer)).await.unwrap()
    }

    pub(crate) async fn admin(&self) -> MembershipClient {
        self.client(Some(&self.bearer("admin", UserScope::Admin))).await
    }

    /// Returns an HTTP client that trusts the gateway's certificate, and its origin.
    pub(crate) fn http_client(&self) -> (reqwest::Client, String) {
        let certificate = reqwest::Certificate::from_pem(self.ca_pem.as_bytes()).unwrap();
        let client = bounded_http::client_builder()
            .tls_certs_only([certificate])
            .resolve(identity::SERVER_NAME, self.address.parse().unwrap())
            .build()
            .unwrap();
        let port = self.address.rsplit_once(':').unwrap().1;
        (client, format!("https://{}:{port}", identity::SERVER_NAME))
    }

    async fn channel(&self) -> Channel {
        let tls = ClientTlsConfig::new()
            .ca_certificate(Certificate::from_pem(&self.ca_pem))
            .domain_name(identity::SERVER_NAME);
        let endpoint = Channel::from_shared(format!("https://{}", self.address)).unwrap();
        endpoint.tls_config(tls).unwrap().connect().await.unwrap()
    }

    async fn token(&self, uses: u32) -> JoinToken {
        let request = v1::CreateTokenRequest {
            roles: vec!["generator".into(), "evaluator".into()],
            uses,
            expires_in_s: 60.0,
            ..Default::default()
        };
        self.admin().await.create_token(request).await.unwrap().line.parse().unwrap()
    }

    pub(crate) fn identity(&self, name: &str) -> MemberIdentity {
        MemberIdentity::with_default_files(name)
            .resolve_in(&self.dir.path().join("credentials").join(name))
    }

    /// Builds the request of a box with this name and key, which may belong to another member.
    fn join_request(&self, token: &JoinToken, name: &str, key: &MemberIdentity) -> v1::JoinRequest {
        let at_ms = u64::try_from(now().as_millis()).unwrap();
        let name = AgentId::new(name).unwrap();
        let purpose = ProofPurpose::Join { token: &token.id };
        let statement = ProofStatement { purpose, fleet: token.ca, name: &name, at_ms };
        v1::JoinRequest {
            id: token.id.clone(),
            secret: token.secret.clone(),
            name: name.to_string(),
            public_key: key.ensure_public_key().unwrap(),
            proof: Some(v1::KeyProof { at_ms, signature: statement.sign_with(key).unwrap() }),
            ..Default::default()
        }
    }

    async fn join(&self, token: &JoinToken, name: &str) -> Result<v1::Membership, ClientError> {
        // Proofs must differ in their time.
        tokio::time::sleep(Duration::from_millis(2)).await;
        let request = self.join_request(token, name, &self.identity(name));
        self.client(None).await.join_fleet(request).await
    }

    fn renew_request(&self, name: &str, at_ms: u64) -> v1::RenewRequest {
        let fleet = Fingerprint::from_pem(&self.ca_pem).unwrap();
        let id = AgentId::new(name).unwrap();
        let statement = ProofStatement { purpose: ProofPurpose::Renew, fleet, name: &id, at_ms };
        let signature = statement.sign_with(&self.identity(name)).unwrap();
        v1::RenewRequest { name: name.into(), proof: Some(v1::KeyProof { at_ms, signature }) }
    }

    async fn uses_left(&self, token: &JoinToken) -> u32 {
        let tokens = self.admin().await.list_tokens().await.unwrap();
        tokens.iter().find(|one| one.id == token.id).unwrap().uses_left
    }
}

impl Drop for Closed {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

fn with<T>(message: T, bearer: &str) -> Request<T> {
    let mut request = Request::new(message);
    request.metadata_mut().insert("authorization", format!("Bearer {bearer}").parse().unwrap());
    request
}

/// Calls a method with an empty message, and returns true if access control passed the call.
async fn is_let_through(channel: &Channel, path: &str, bearer: Option<&str>) -> Result<(), Status> {
    let mut request = match bearer {
        Some(bearer) => with((), bearer),
        None => Request::new(()),
    };
    request.set_timeout(Duration::from_millis(300));
    let mut grpc = tonic::client::Grpc::new(channel.clone());
    grpc.ready().await.unwrap();
    let codec = tonic_prost::ProstCodec::<(), ()>::default();
    let path: PathAndQuery = path.parse().unwrap();
    let answered = timeout(PATIENCE, grpc.unary(request, path, codec)).await.unwrap();
    match answered {
        Err(status) if [Code::Unauthenticated, Code::PermissionDenied].contains(&status.code()) => {
            Err(status)
        }
        // Any other outcome is the service's decision.
        _ => Ok(()),
    }
}

fn methods() -> BTreeSet<String> {
    let set = prost_types::FileDescriptorSet::decode(wire::FILE_DESCRIPTOR_SET).unwrap();
    let services = set.file.iter().flat_map(|file| &file.service);
    let paths = services.flat_map(|service| {
        service.method.iter().map(|m| format!("/flotilla.v1.{}/{}", service.name(), m.name()))
    });
    paths.collect()
}

const OPERATORS: [&str; 10] = [
    "Runs/Submit",
    "Runs/Fork",
    "Runs/Pause",
    "Runs/Resume",
    "Runs/Cancel",
    "Fleet/Drain",
    "Channels/Move",
    "Channels/RollBack",
    "Channels/Learn",
    "Channels/Kept",
];
const ADMINS: [&str; 5] = [
    "Members/CreateToken",
    "Members/ListTokens",
    "Members/RevokeToken",
    "Members/Revoke",
    "Members/CreateUser",
];
/// These methods have a proof in their request.
const PROVEN: [&str; 3] = ["Members/Join", "Members/Renew", "Members/ExchangeLoginCode"];

#[tokio::test]
async fn each_scope_may_call_its_methods_and_no_others() {
    let fleet = Closed::start().await;
    let channel = fleet.channel().await;
    let agent =
        MemberKind::Agent { roles: [MemberRole::Trainer].into(), pool: "default".parse().unwrap() };
    let callers = [
        (0, fleet.bearer_until("box-3", agent, None)),
        (0, fleet.bearer("carl", UserScope::Client)),
        (1, fleet.bearer("rita", UserScope::Reader)),
        (2, fleet.bearer("olga", UserScope::Operator)),
        (3, fleet.bearer("ada", UserScope::Admin)),
    ];
    for path in methods() {
        let name = path.strip_prefix("/flotilla.v1.").unwrap();
        if PROVEN.contains(&name) {
            continue;
        }
        let needs = match name {
            name if ADMINS.contains(&name) => 3,
            name if OPERATORS.contains(&name) => 2,
            // Every member may call it.
            "Fleet/Hello" => 0,
            _ => 1,
        };
        let stranger = is_let_through(&channel, &path, None).await.unwrap_err();
        assert_eq!(stranger.code(), Code::Unauthenticated, "{path}: {stranger}");
        for (is, bearer) in &callers {
            match is_let_through(&channel, &path, Some(bearer)).await {
                Ok(()) => assert!(*is >= needs, "{path} let {is} through"),
                Err(status) => {
                    assert!(*is < needs, "{path} refused {is}: {status}");
                    assert_eq!(status.code(), Code::PermissionDenied);
                    let scope = ["", "reader", "operator", "admin"][needs];
                    assert!(status.message().contains(&format!("needs {scope}")), "{status}");
                }
            }
        }
    }
    let health = "/grpc.health.v1.Health/Check";
    is_let_through(&channel, health, None).await.unwrap();
    let watch = "/grpc.health.v1.Health/Watch";
    is_let_through(&channel, watch, None).await.unwrap_err();
    let request = with(HealthCheckRequest::default(), &callers[0].1);
    HealthClient::new(channel.clone()).watch(request).await.map(drop).unwrap();
    let reflection = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo";
    is_let_through(&channel, reflection, None).await.unwrap_err();
    is_let_through(&channel, reflection, Some(&callers[0].1)).await.unwrap();
}

#[tokio::test]
async fn a_call_that_controls_a_run_is_attributed_to_its_caller() {
    let fleet = Closed::start().await;
    let mut runs = RunsClient::new(fleet.channel().await);
    let run = RunId::new("r-1").unwrap();
    let kind = Some(v1::spec::Kind::Watched(v1::spec::Watched::default()));
    let spec = FactBody::Spec(v1::Spec { kind, ..Default::default() });
    let spec = Fact { subject: Subject::new(&run, FactKey::WatchedSpec), body: spec };
    fleet.bus.publish_fact(&spec).await.unwrap();
    let request = || v1::ControlRequest { run: run.to_string(), reason: "lunch".into() };
    let [olga, ada] = [("olga", UserScope::Operator), ("ada", UserScope::Admin)]
        .map(|(name, scope)| fleet.bearer(name, scope));
    runs.pause(with(request(), &olga)).await.unwrap();
    let shown = runs.get(with(v1::GetRunRequest { run: run.to_string() }, &ada)).await.unwrap();
    assert_eq!(shown.into_inner().message, "by olga: lunch");
    runs.resume(with(request(), &ada)).await.unwrap();
    runs.cancel(with(request(), &olga)).await.unwrap();
    let report = FleetControl::with_store(fleet.bus.clone(), fleet.store().await)
        .explain_run(&run, None)
        .await
        .unwrap();
    let by: Vec<_> = report.controls.iter().map(|it| (&*it.action, it.by.as_deref())).collect();
    let expected = [("pause", Some("olga")), ("resume", Some("ada")), ("cancel", Some("olga"))];
    assert_eq!(by, expected);
}

#[tokio::test]
async fn a_bearer_that_is_no_good_is_refused_with_what_helps() {
    let fleet = Closed::start().await;
    let other = TempDir::new().unwrap();
    let at = other.path().join("keys");
    let (theirs, _) = FleetAuthority::create_or_open(&at, "theirs", &[], now().as_secs()).unwrap();
    let standing = || MemberKind::User { scope: UserScope::Admin };
    let admin = Member { name: AgentId::new("admin").unwrap(), standing: standing() };
    let foreign = theirs.issue_tokens(&admin, &user_key(), now().as_secs(), None).unwrap().bearer;
    let ended = now().as_secs() - 5;
    let expired = fleet.bearer_until("ada", standing(), Some(ended));
    let mut runs = RunsClient::new(fleet.channel().await);
    let asked = now().as_secs();
    let status = runs.list(with(v1::ListRunsRequest {}, &expired)).await.unwrap_err();
    assert_eq!(status.code(), Code::Unauthenticated, "{status}");
    // A second may have passed during the call.
    let told = |at: u64| status.message().contains(&format!("expired {} s ago", at - ended));
    assert!((asked..=now().as_secs()).any(told), "{status}");
    for (bearer, said) in
        [("rubbish", "bearer.jwt"), (&foreign, "not this fleet's"), ("", "bearer")]
    {
        let status = runs.list(with(v1::ListRunsRequest {}, bearer)).await.unwrap_err();
        assert_eq!(status.code(), Code::Unauthenticated, "{status}");
        assert!(status.message().contains(said), "{said} is not in {status}");
    }
    let status = runs.list(v1::ListRunsRequest {}).await.unwrap_err();
    assert!(status.message().contains("--dir DIR"), "{status}");
}

#[tokio::test]
async fn json_and_openai_s_api_need_a_bearer_and_its_scope() {
    let closed = Closed::start().await;
    let (client, origin) = closed.http_client();
    let call = async |method: &str, bearer: Option<&str>| {
        let url = format!("{origin}/flotilla.v1.{method}");
        let mut asked = client.post(url).header("content-type", "application/json").body("{}");
        if let Some(bearer) = bearer {
            asked = asked.bearer_auth(bearer);
        }
        let answer = asked.send().await.unwrap();
        let status = answer.status().as_u16();
        let said: serde_json::Value = serde_json::from_str(&answer.text().await.unwrap()).unwrap();
        (status, said["code"].as_str().map(str::to_owned))
    };
    let denied = |status, code: &str| (status, Some(code.to_owned()));
    assert_eq!(call("Runs/List", None).await, denied(401, "unauthenticated"));
    assert_eq!(call("Runs/List", Some("nonsense")).await, denied(401, "unauthenticated"));
    let reader = closed.bearer("reader", UserScope::Reader);
    assert_eq!(call("Runs/List", Some(&reader)).await, (200, None));
    assert_eq!(call("Fleet/Drain", Some(&reader)).await, denied(403, "permission_denied"));

    let list_models = async |bearer: Option<&str>| {
        let mut asked = client.get(format!("{origin}/v1/models"));
        if let Some(bearer) = bearer {
            asked = asked.bearer_auth(bearer);
        }
        let answer = asked.send().await.unwrap();
        (answer.status().as_u16(), answer.text().await.unwrap())
    };
    let (status, said) = list_models(None).await;
    assert!(status == 401 && said.contains("K101"), "{status}: {said}");
    for role in [MemberRole::Trainer, MemberRole::Server, MemberRole::Watcher] {
        let kind = MemberKind::Agent { roles: [role].into(), pool: "default".parse().unwrap() };
        let agent = closed.bearer_until("box-3", kind, None);
        let (status, said) = list_models(Some(&agent)).await;
        assert!(status == 403 && said.contains("needs client"), "{role:?} got {status}: {said}");
    }
    let carl = closed.bearer("carl", UserScope::Client);
    let (status, said) = list_models(Some(&carl)).await;
    assert_eq!(status, 200, "{said}");
    let said: serde_json::Value = serde_json::from_str(&said).unwrap();
    assert_eq!(said, serde_json::json!({ "object": "list", "data": [] }));
    assert_eq!(call("Runs/List", Some(&carl)).await, denied(403, "permission_denied"));
}

#[tokio::test]
async fn a_revoked_caller_loses_its_streams_within_a_second_and_another_keeps_its_own() {
    let fleet = Closed::start().await;
    let token = fleet.token(2).await;
    for (name, scope) in [("rita", "reader"), ("bob", "reader")] {
        let request = v1::CreateUserRequest {
            name: name.into(),
            public_key: fleet.identity(name).ensure_public_key().unwrap(),
            scope: scope.into(),
            expires_in_s: 60.0,
        };
        let made = fleet.admin().await.create_user(request).await.unwrap();
        assert_eq!((made.scope.as_str(), made.valid_s), ("reader", 60.0));
        std::fs::write(fleet.dir.path().join(name), made.bearer).unwrap();
    }
    let wrong = v1::CreateUserRequest { name: "Bob X".into(), ..Default::default() };
    let error = fleet.admin().await.create_user(wrong).await.unwrap_err().to_string();
    assert!(error.contains("user \"Bob X\" must be"), "{error}");
    let bearer = |name: &str| std::fs::read_to_string(fleet.dir.path().join(name)).unwrap();
    let mut evals = EvalsClient::new(fleet.channel().await);
    let watch = |name: &str| with(v1::WatchEvalsRequest::default(), &bearer(name));
    let mut ritas = evals.watch(watch("rita")).await.unwrap().into_inner();
    let mut bobs = evals.watch(watch("bob")).await.unwrap().into_inner();

    let began = Instant::now();
    let revoking = tokio::spawn({
        let mut admin = fleet.admin().await;
        async move { admin.revoke_member("rita").await }
    });
    let status = timeout(PATIENCE, ritas.message()).await.unwrap().unwrap_err();
    println!("the stream of who was revoked ended after {:?}", began.elapsed());
    assert_eq!(status.code(), Code::Unauthenticated, "{status}");
    assert!(status.message().contains("rita was revoked"), "{status}");
    revoking.await.unwrap().unwrap();
    let status = evals.history(with(v1::EvalFilter::default(), &bearer("rita"))).await.unwrap_err();
    assert_eq!(status.code(), Code::Unauthenticated, "{status}");
    evals.history(with(v1::EvalFilter::default(), &bearer("bob"))).await.unwrap();
    assert!(timeout(Duration::from_millis(300), bobs.message()).await.is_err(), "bob's goes on");
    fleet.join(&token, "rita").await.unwrap_err();
}

#[tokio::test]
async fn the_last_uses_of_a_token_go_to_as_many_as_there_are_of_them() {
    let fleet = Closed::start().await;
    let token = fleet.token(3).await;
    let mut joining = JoinSet::new();
    for n in 0..8 {
        let name = format!("box-{n}");
        let request = fleet.join_request(&token, &name, &fleet.identity(&name));
        let target = fleet.target(None);
        joining.spawn(async move {
            MembershipClient::connect_first(&target).await?.join_fleet(request).await
        });
    }
    let joined = joining.join_all().await;
    let (let_in, refused): (Vec<_>, Vec<_>) = joined.into_iter().partition(Result::is_ok);
    assert_eq!((let_in.len(), fleet.uses_left(&token).await), (3, 0), "{refused:?}");
    for error in refused.into_iter().map(Result::unwrap_err) {
        let error = error.to_string();
        assert!(error.contains("used up") && error.contains("token create"), "{error}");
    }
    for joined in let_in.into_iter().map(Result::unwrap) {
        assert_eq!(joined.roles, ["generator", "evaluator"]);
        assert_eq!((joined.pool.as_str(), joined.ca_pem), ("default", fleet.ca_pem.clone()));
        assert_eq!(joined.gateways, std::slice::from_ref(&fleet.address));
        // After a lost answer the same request succeeds.
        let again = fleet.join(&token, &joined.name).await.unwrap();
        assert_eq!((again.name, fleet.uses_left(&token).await), (joined.name, 0));
    }
}

#[tokio::test]
async fn impossible_joins_give_a_reason_and_cost_no_use() {
    let fleet = Closed::start().await;
    let token = fleet.token(5).await;
    fleet.join(&token, "box-1").await.unwrap();
    let mut client = fleet.client(None).await;
    let good = |name: &str| fleet.join_request(&token, name, &fleet.identity(name));
    let wrong = [
        (v1::JoinRequest { secret: "guess".into(), ..good("box-2") }, "the join token is unknown"),
        (v1::JoinRequest { id: "zz".into(), ..good("box-2") }, "not signed with the key"),
        (
            v1::JoinRequest { roles: vec!["trainer".into()], ..good("box-2") },
            "generator, evaluator",
        ),
        (v1::JoinRequest { roles: vec!["cook".into()], ..good("box-2") }, "is not a role"),
        (v1::JoinRequest { name: "Box 2".into(), ..good("box-2") }, "must be 1 to 64"),
        (v1::JoinRequest { proof: None, ..good("box-2") }, "not signed"),
        (fleet.join_request(&token, "box-1", &fleet.identity("box-2")), "another member's"),
        (good("admin"), "the fleet's own"),
    ];
    for (request, said) in wrong {
        let error = client.join_fleet(request).await.unwrap_err().to_string();
        assert!(error.contains(said), "{said} is not in: {error}");
    }
    assert_eq!(fleet.uses_left(&token).await, 4);
    fleet.admin().await.revoke_token(&token.id).await.unwrap();
    let error = fleet.join(&token, "box-2").await.unwrap_err().to_string();
    assert!(error.contains("was revoked"), "{error}");
    let secretless = format!("{:?}", fleet.admin().await.list_tokens().await.unwrap());
    assert!(!secretless.contains(&token.secret), "{secretless}");
    assert!(secretless.contains("box-1"), "{secretless}");
}

#[tokio::test]
async fn a_member_renews_by_its_key_once_for_each_proof_until_it_is_revoked() {
    let fleet = Closed::start().await;
    let token = fleet.token(1).await;
    fleet.join(&token, "box-1").await.unwrap();
    let mut client = fleet.client(None).await;
    let ms = || u64::try_from(now().as_millis()).unwrap();
    tokio::time::sleep(Duration::from_millis(2)).await;
    let request = fleet.renew_request("box-1", ms());
    let renewed = client.renew_membership(request.clone()).await.unwrap();
    assert_eq!((renewed.valid_s, renewed.roles.len()), (3600.0, 2));
    let error = client.renew_membership(request).await.unwrap_err().to_string();
    assert!(error.contains("already used"), "{error}");
    let error =
        client.renew_membership(fleet.renew_request("box-1", ms() - 900_000)).await.unwrap_err();
    assert!(error.to_string().contains("clocks differ by 9"), "{error}");
    fleet.identity("box-9").ensure_public_key().unwrap();
    let error = client.renew_membership(fleet.renew_request("box-9", ms())).await.unwrap_err();
    assert!(error.to_string().contains("no member box-9"), "{error}");
    fleet.identity("box-2").ensure_public_key().unwrap();
    let mut stolen = fleet.renew_request("box-2", ms());
    stolen.name = "box-1".into();
    let error = client.renew_membership(stolen).await.unwrap_err().to_string();
    assert!(error.contains("not signed with the key of box-1"), "{error}");

    fleet.admin().await.revoke_member("box-1").await.unwrap();
    tokio::time::sleep(Duration::from_millis(2)).await;
    let error = client.renew_membership(fleet.renew_request("box-1", ms())).await.unwrap_err();
    assert!(error.is_revoked() && error.to_string().contains("was revoked"), "{error}");
    // A box that was set up again has a new key, and may use the old name.
    std::fs::remove_dir_all(fleet.dir.path().join("credentials/box-1")).unwrap();
    let token = fleet.token(1).await;
    fleet.join(&token, "box-1").await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn who_is_cut_off_stays_out_of_the_bus_however_it_renews_meanwhile() {
    let fleet = Closed::start().await;
    let token = fleet.token(1).await;
    let joined = fleet.join(&token, "box-1").await.unwrap();
    let credentials = fleet.identity("box-1");
    let files = |one: &v1::Membership| {
        let files = CredentialFiles { jwt: &one.user_jwt, bearer: &one.bearer, ca: &one.ca_pem };
        credentials.write_files(&files).unwrap();
    };
    files(&joined);
    let options = ConnectOptions {
        urls: vec![fleet.nats.client_url()],
        identity: Some(credentials.clone()),
        ..Default::default()
    };
    let bus = Bus::connect(&options).await.unwrap();
    let ms = || u64::try_from(now().as_millis()).unwrap();
    let mut renewing = JoinSet::new();
    for number in 0..16 {
        let mut client = fleet.client(None).await;
        let request = fleet.renew_request("box-1", ms() + number);
        renewing.spawn(async move { client.renew_membership(request).await });
    }
    fleet.admin().await.revoke_member("box-1").await.unwrap();
    for renewed in renewing.join_all().await {
        // A renewal may have passed at the last moment.
        if let Ok(renewed) = renewed {
            files(&renewed);
        }
        let error = Bus::connect(&options).await.unwrap_err();
        assert!(matches!(error, bus::ConnectError::Refused { .. }), "{error:?}");
    }
    assert!(!bus.is_connected());
}

#[tokio::test]
async fn a_client_that_guesses_secrets_is_slowed_down() {
    let fleet = Closed::start().await;
    let token = fleet.token(1).await;
    let mut client = MembersClient::new(fleet.channel().await);
    let mut request = fleet.join_request(&token, "box-1", &fleet.identity("box-1"));
    request.secret = "guess".into();
    let mut refused = Vec::new();
    for _ in 0..40 {
        refused.push(client.join(request.clone()).await.unwrap_err());
    }
    let slowed: Vec<_> =
        refused.iter().filter(|status| status.code() == Code::ResourceExhausted).collect();
    assert!((5..=11).contains(&slowed.len()), "{slowed:?}");
    assert!(slowed[0].message().contains("try again in"), "{:?}", slowed[0]);
    assert!(slowed[0].metadata().contains_key("retry-after"), "{:?}", slowed[0]);
    // Members have rates of their own.
    fleet.admin().await.list_members().await.unwrap();
}

#[tokio::test]
async fn an_address_that_accepts_and_says_nothing_gives_way_to_the_next() {
    let fleet = Closed::start().await;
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addresses = vec![silent.local_addr().unwrap().to_string(), fleet.address.clone()];
    let target = GatewayTarget { addresses, ..fleet.target(None) };
    let connected = timeout(PATIENCE, MembershipClient::connect_first(&target)).await;
    assert_eq!(connected.unwrap().unwrap().address(), fleet.address);
}

#[tokio::test]
async fn a_fleet_is_known_by_its_authority_and_by_nothing_else() {
    let fleet = Closed::start().await;
    let ours = Fingerprint::from_pem(&fleet.ca_pem).unwrap();
    let fetched = fetch_authority(&fleet.address, ours).await.unwrap();
    assert_eq!(Fingerprint::from_pem(&fetched).unwrap(), ours);
    MembershipClient::connect_first(&GatewayTarget { ca_pem: fetched, ..fleet.target(None) })
        .await
        .map(drop)
        .unwrap();

    let other = Fingerprint::from_der(b"another");
    let error = fetch_authority(&fleet.address, other).await.unwrap_err();
    assert!(matches!(error, PinError::OtherFleet { .. }), "{error}");
    assert!(error.to_string().contains(&ours.to_string()), "{error}");

    let directory = TempDir::new().unwrap();
    let at = directory.path().join("keys");
    let (theirs, _) = FleetAuthority::create_or_open(&at, "theirs", &[], now().as_secs()).unwrap();
    let wrong = GatewayTarget { ca_pem: theirs.ca_pem().to_owned(), ..fleet.target(None) };
    let error = MembershipClient::connect_first(&wrong).await.map(drop).unwrap_err();
    assert!(matches!(error, ClientError::Unreachable { .. }), "{error}");
    assert!(error.to_string().contains("certificate"), "{error}");
    let plain = Channel::from_shared(format!("http://{}", fleet.address)).unwrap().connect().await;
    if let Ok(plain) = plain {
        RunsClient::new(plain).list(v1::ListRunsRequest {}).await.unwrap_err();
    }
    // A browser is sent to the address with TLS.
    let mut browser = TcpStream::connect(fleet.address.as_str()).await.unwrap();
    browser.write_all(b"GET /page?a=1 HTTP/1.1\r\nhost: bus.lan\r\n\r\n").await.unwrap();
    let mut answer = String::new();
    timeout(PATIENCE, browser.read_to_string(&mut answer)).await.unwrap().unwrap();
    assert!(answer.starts_with("HTTP/1.1 307 "), "{answer}");
    assert!(answer.contains("\r\nlocation: https://bus.lan/page?a=1\r\n"), "{answer}");
}

/// Lists runs without TLS; returns the HTTP status.
async fn list_runs_plainly(fleet: &Closed, host: &str, bearer: Option<&str>) -> u16 {
    let client = bounded_http::client_builder().no_proxy().build().unwrap();
    let asked = client.post(format!("http://{}/flotilla.v1.Runs/List", fleet.address));
    let mut asked = asked.header("host", host).header("content-type", "application/json");
    if let Some(bearer) = bearer {
        asked = asked.bearer_auth(bearer);
    }
    // A gateway that refuses may close the connection before it has read everything.
    asked.body("{}").send().await.map_or(400, |answer| answer.status().as_u16())
}

#[tokio::test]
async fn on_its_own_machine_the_gateway_needs_a_bearer_and_a_loopback_name_but_no_tls() {
    let fleet = Closed::start().await;
    let port = fleet.address.rsplit_once(':').unwrap().1;
    let bearer = fleet.bearer("rita", UserScope::Reader);
    for name in ["127.0.0.1", "localhost", "[::1]"] {
        let host = format!("{name}:{port}");
        assert_eq!(list_runs_plainly(&fleet, &host, Some(&bearer)).await, 200, "{host}");
        assert_eq!(list_runs_plainly(&fleet, &host, None).await, 401, "{host}");
    }
    // DNS rebinding: a public name that points to this machine.
    let host = format!("evil.example:{port}");
    assert_eq!(list_runs_plainly(&fleet, &host, Some(&bearer)).await, 400);
}

#[tokio::test]
async fn what_was_granted_outlives_the_gateway() {
    let fleet = Closed::start().await;
    let token = fleet.token(2).await;
    fleet.join(&token, "box-1").await.unwrap();
    // Another coordinator's gateway, on the same bus and with the same keys.
    let terms = MembershipConfig {
        keys_dir: fleet.keys.clone(),
        nats_servers: vec![fleet.nats.client_url()],
        advertised_nats: Vec::new(),
        advertised_gateways: Vec::new(),
        store: String::new(),
        member_ttl: Duration::from_secs(60),
        lease: Duration::from_secs(60),
    };
    let second = MemberRegistry::new(fleet.bus.clone(), terms);
    let members = second.list_members().await.unwrap();
    assert_eq!((members.len(), members[0].name.as_str()), (1, "box-1"));
    tokio::time::sleep(Duration::from_millis(2)).await;
    let request = fleet.join_request(&token, "box-2", &fleet.identity("box-2"));
    assert_eq!(second.join_agent(&request).await.unwrap().valid_s, 60.0);
    assert_eq!(fleet.uses_left(&token).await, 0);
}

#[tokio::test]
async fn a_silent_connection_is_closed() {
    let fleet = Closed::start().await;
    let mut silent = TcpStream::connect(&fleet.address).await.unwrap();
    let mut rude = TcpStream::connect(&fleet.address).await.unwrap();
    rude.write_all(b"GET / HTTP/1.1\r\nHost: gateway\r\n\r\n").await.unwrap();
    let tls = identity::fleet_client_config(fleet.ca_pem.as_bytes()).unwrap();
    let name = identity::SERVER_NAME.try_into().unwrap();
    let socket = TcpStream::connect(&fleet.address).await.unwrap();
    let connector = tokio_rustls::TlsConnector::from(std::sync::Arc::new(tls));
    let mut shaken = connector.connect(name, socket).await.unwrap();

    let mut said = Vec::new();
    // Refused and closed at once.
    let _ = timeout(Duration::from_secs(5), rude.read_to_end(&mut said)).await.unwrap();
    let closed = async {
        let mut said = Vec::new();
        let _ = silent.read_to_end(&mut said).await;
        let _ = shaken.read_to_end(&mut said).await;
    };
    timeout(PATIENCE, closed).await.unwrap();
    fleet.admin().await.list_members().await.unwrap();
}

type Shaken = tokio_rustls::client::TlsStream<TcpStream>;

/// Opens a connection with HTTP/1.1.
async fn connect_tls(fleet: &Closed) -> Shaken {
    let mut tls = identity::fleet_client_config(fleet.ca_pem.as_bytes()).unwrap();
    tls.alpn_protocols = vec![b"http/1.1".to_vec()];
    let connector = tokio_rustls::TlsConnector::from(std::sync::Arc::new(tls));
    let socket = TcpStream::connect(&fleet.address).await.unwrap();
    connector.connect(identity::SERVER_NAME.try_into().unwrap(), socket).await.unwrap()
}

/// Sends a head, and then a byte a second until the gateway ends the connection; returns the answer
/// and the duration.
async fn trickle(
    mut stream: impl AsyncRead + AsyncWrite + Unpin,
    head: &str,
) -> (String, Duration) {
    stream.write_all(head.as_bytes()).await.unwrap();
    let (began, mut said) = (Instant::now(), Vec::new());
    let mut tick = tokio::time::interval(Duration::from_secs(1));
    loop {
        tokio::select! {
            read = stream.read_buf(&mut said) => match read {
                Ok(0) | Err(_) => break,
                Ok(_) => {}
            },
            _ = tick.tick() => if stream.write_all(b"x").await.is_err() { break },
        }
        assert!(began.elapsed() < Duration::from_secs(60), "it is still open");
    }
    (String::from_utf8_lossy(&said).into_owned(), began.elapsed())
}

#[tokio::test]
async fn a_stranger_that_sends_a_byte_a_second_is_cut_off() {
    let fleet = Closed::start().await;
    let head = |kind: &str| {
        format!(
            "POST /flotilla.v1.Members/Join HTTP/1.1\r\nhost: fleet\r\ncontent-type: {kind}\r\n\
             content-length: 60000\r\n\r\n"
        )
    };
    // The envelope of a message of 16 KiB.
    let grpc = head("application/grpc") + "\0\0\0\x40\0";
    let plain = head("text/plain");
    let page = "POST /openapi.json HTTP/1.1\r\nhost: fleet\r\ncontent-length: 60000\r\n\r\n";
    let bare = TcpStream::connect(&fleet.address).await.unwrap();
    let (grpc, plain, page, slow_head, slow_handshake) = tokio::join!(
        trickle(connect_tls(&fleet).await, &grpc),
        trickle(connect_tls(&fleet).await, &plain),
        trickle(connect_tls(&fleet).await, page),
        trickle(connect_tls(&fleet).await, "GET / HTTP/1.1\r\nhost: fleet\r\nx-slow-and-long: "),
        // The first bytes of a long handshake.
        trickle(bare, "\x16\x03\x01\x3f\x00\x01\x00\x3e\x00"),
    );
    let limit = Duration::from_secs(15);
    for (said, took) in [&grpc, &plain, &page, &slow_head, &slow_handshake] {
        assert!(*took < limit, "{took:?}: {said}");
    }
    assert!(grpc.0.contains("grpc-status: 4\r\n") && grpc.0.contains("G102"), "{}", grpc.0);
}

#[tokio::test]
async fn a_member_that_uploads_slowly_is_not_cut_off() {
    let fleet = Closed::start().await;
    let bytes = vec![7; 1 << 20];
    let hex = wire::Digest::hash_bytes(&bytes).to_hex();
    let bearer = fleet.bearer("olga", UserScope::Operator);
    let mut stream = connect_tls(&fleet).await;
    let head = format!(
        "PUT /store/blobs/{}/{hex} HTTP/1.1\r\nhost: fleet\r\nauthorization: Bearer {bearer}\r\n\
         content-length: {}\r\nconnection: close\r\n\r\n",
        &hex[..2],
        bytes.len()
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    let began = Instant::now();
    for piece in bytes.chunks(bytes.len() / 16) {
        stream.write_all(piece).await.unwrap();
        stream.flush().await.unwrap();
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    assert!(began.elapsed() > Duration::from_secs(12), "longer than a stranger has");
    let mut said = Vec::new();
    let _ = timeout(PATIENCE, stream.read_to_end(&mut said)).await.unwrap();
    let said = String::from_utf8_lossy(&said);
    assert!(said.starts_with("HTTP/1.1 204"), "{said}");
}
