//! A headless Chromium, controlled by chromedriver.

use std::{
    io::{BufRead, BufReader},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use e2e::GroupGuard;
use fantoccini::{
    ClientBuilder, Locator,
    elements::Element,
    wd::{Capabilities, TimeoutConfiguration, WebDriverCompatibleCommand},
};
use hyper_util::client::legacy::connect::HttpConnector;
use requirements::require_program;
use serde_json::{Value, json};

/// The limit for a page to show something.
const LIMIT: Duration = Duration::from_secs(60);
const POLL_INTERVAL: Duration = Duration::from_millis(50);

pub(crate) struct Browser {
    pub(crate) client: fantoccini::Client,
    /// chromedriver, whose group has the browser.
    _driver: GroupGuard,
}

impl Browser {
    /// Starts a browser. Records this test as skipped and returns `None` without chromedriver.
    pub(crate) async fn start() -> Option<Self> {
        let mut command = Command::new(require_program("chromedriver")?);
        command.arg("--port=0").stdout(Stdio::piped()).stderr(Stdio::null());
        let mut driver = GroupGuard::start(&mut command);
        let stdout = BufReader::new(driver.0.stdout.take().expect("a pipe"));
        let port = stdout.lines().map_while(Result::ok).find_map(|line| {
            let (_, port) = line.split_once("successfully on port ")?;
            Some(port.trim_end_matches('.').to_owned())
        });
        let port = port.expect("chromedriver prints its port");
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
            // A closed fleet has a self-signed certificate.
            "acceptInsecureCerts": true,
        });
        let capabilities: Capabilities = serde_json::from_value(capabilities).expect("an object");
        let client = ClientBuilder::new(HttpConnector::new())
            .capabilities(capabilities)
            .connect(&format!("http://127.0.0.1:{port}"))
            .await
            .expect("a browser");
        let timeouts = TimeoutConfiguration::new(Some(LIMIT), Some(LIMIT), None);
        client.update_timeouts(timeouts).await.expect("a limit for scripts");
        Some(Self { client, _driver: driver })
    }

    pub(crate) async fn open(&self, url: &str) {
        self.client.goto(url).await.expect(url);
    }

    /// Waits for an element and returns it.
    pub(crate) async fn wait_for(&self, selector: &str) -> Element {
        let began = Instant::now();
        loop {
            if let Ok(element) = self.client.find(Locator::Css(selector)).await {
                return element;
            }
            assert!(began.elapsed() < LIMIT, "no {selector} in:\n{}", self.visible_text().await);
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    /// Runs a script until it returns a value that is not null or false, and returns it.
    pub(crate) async fn wait_until_true(&self, script: &str) -> Value {
        let began = Instant::now();
        loop {
            let value = self.evaluate(script).await;
            if value.as_bool().unwrap_or(!value.is_null()) {
                return value;
            }
            assert!(began.elapsed() < LIMIT, "never: {script}\n{}", self.visible_text().await);
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    pub(crate) async fn click(&self, selector: &str) {
        // An element that is redrawn at this moment is searched again.
        let began = Instant::now();
        while self.wait_for(selector).await.click().await.is_err() {
            assert!(began.elapsed() < LIMIT, "{selector} cannot be clicked");
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    pub(crate) async fn evaluate(&self, script: &str) -> Value {
        self.client.execute(script, Vec::new()).await.expect(script)
    }

    /// Returns the visible text of the page.
    pub(crate) async fn visible_text(&self) -> String {
        let text = self.evaluate("return document.body.innerText").await;
        text.as_str().unwrap_or_default().to_owned()
    }

    /// Returns the console errors since the last call.
    pub(crate) async fn console_errors(&self) -> Vec<String> {
        let log = self.client.issue_cmd(BrowserLog).await.expect("the browser's log");
        let entries = log.as_array().expect("entries");
        entries.iter().map(|entry| entry["message"].to_string()).collect()
    }

    pub(crate) async fn close(self) {
        self.client.close().await.expect("the browser ends");
    }
}

/// The log of Chromium: console messages and blocked requests.
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
