//! A headless Chromium, driven by chromedriver.

use std::{
    io::{BufRead, BufReader},
    os::unix::process::CommandExt,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use fantoccini::{
    ClientBuilder, Locator,
    elements::Element,
    wd::{Capabilities, TimeoutConfiguration, WebDriverCompatibleCommand},
};
use hyper_util::client::legacy::connect::HttpConnector;
use rustix::process::{Pid, Signal, kill_process_group};
use serde_json::{Value, json};

/// Until a page shows what it should.
const LIMIT: Duration = Duration::from_secs(60);
const LOOK_EVERY: Duration = Duration::from_millis(50);

pub(crate) struct Browser {
    pub(crate) client: fantoccini::Client,
    _driver: Driver,
}

/// Ends with the test, and its browser with it: both are in a process group of their own.
struct Driver(Child);

impl Drop for Driver {
    fn drop(&mut self) {
        let _ = kill_process_group(Pid::from_child(&self.0), Signal::KILL);
        let _ = self.0.wait();
    }
}

impl Browser {
    /// `None`, with a word on stdout, where there is no chromedriver.
    pub(crate) async fn start() -> Option<Self> {
        let driver = Command::new("chromedriver")
            .arg("--port=0")
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn();
        let Ok(mut driver) = driver else {
            println!("skipped: there is no chromedriver (Debian: chromium, chromium-driver)");
            return None;
        };
        let said = BufReader::new(driver.stdout.take().expect("a pipe"));
        let driver = Driver(driver);
        let port = said.lines().map_while(Result::ok).find_map(|line| {
            let (_, port) = line.split_once("successfully on port ")?;
            Some(port.trim_end_matches('.').to_owned())
        });
        let port = port.expect("chromedriver says where it is");
        let arguments = [
            "--headless=new",
            // Tests run as root in containers.
            "--no-sandbox",
            "--disable-dev-shm-usage",
            "--window-size=1280,900",
            "--enable-precise-memory-info",
        ];
        let capabilities = json!({
            "goog:chromeOptions": { "args": arguments },
            "goog:loggingPrefs": { "browser": "ALL" },
            // A closed fleet's certificate is its own.
            "acceptInsecureCerts": true,
        });
        let capabilities: Capabilities = serde_json::from_value(capabilities).expect("an object");
        let client = ClientBuilder::new(HttpConnector::new())
            .capabilities(capabilities)
            .connect(&format!("http://127.0.0.1:{port}"))
            .await
            .expect("a browser");
        let patient = TimeoutConfiguration::new(Some(LIMIT), Some(LIMIT), None);
        client.update_timeouts(patient).await.expect("a limit for scripts");
        Some(Self { client, _driver: driver })
    }

    pub(crate) async fn open(&self, url: &str) {
        self.client.goto(url).await.expect(url);
    }

    /// The element that a selector names, once it is there.
    pub(crate) async fn see(&self, selector: &str) -> Element {
        let began = Instant::now();
        loop {
            if let Ok(element) = self.client.find(Locator::Css(selector)).await {
                return element;
            }
            assert!(began.elapsed() < LIMIT, "no {selector} in:\n{}", self.text().await);
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    /// Until a script says something that is true, which is returned.
    pub(crate) async fn until(&self, script: &str) -> Value {
        let began = Instant::now();
        loop {
            let said = self.script(script).await;
            if said.as_bool().unwrap_or(!said.is_null()) {
                return said;
            }
            assert!(began.elapsed() < LIMIT, "never: {script}\n{}", self.text().await);
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    pub(crate) async fn click(&self, selector: &str) {
        // What is drawn anew meanwhile is looked for again.
        let began = Instant::now();
        while self.see(selector).await.click().await.is_err() {
            assert!(began.elapsed() < LIMIT, "{selector} cannot be clicked");
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    pub(crate) async fn script(&self, script: &str) -> Value {
        self.client.execute(script, Vec::new()).await.expect(script)
    }

    /// What a person reads.
    pub(crate) async fn text(&self) -> String {
        let text = self.script("return document.body.innerText").await;
        text.as_str().unwrap_or_default().to_owned()
    }

    /// What the page complained of since the last time.
    pub(crate) async fn complaints(&self) -> Vec<String> {
        let log = self.client.issue_cmd(BrowserLog).await.expect("the browser's log");
        let entries = log.as_array().expect("entries");
        entries.iter().map(|entry| entry["message"].to_string()).collect()
    }

    pub(crate) async fn end(self) {
        self.client.close().await.expect("the browser ends");
    }
}

/// Chromium's own: what the page wrote to the console, and what was blocked.
#[derive(Debug)]
struct BrowserLog;

impl WebDriverCompatibleCommand for BrowserLog {
    fn endpoint(
        &self,
        base: &url::Url,
        session: Option<&str>,
    ) -> Result<url::Url, url::ParseError> {
        base.join(&format!("session/{}/se/log", session.unwrap_or_default()))
    }

    fn method_and_body(&self, _: &url::Url) -> (http::Method, Option<String>) {
        (http::Method::POST, Some(json!({ "type": "browser" }).to_string()))
    }
}
