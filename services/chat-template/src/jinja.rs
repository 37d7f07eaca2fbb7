//! The functions and filters that Hugging Face's transformers adds to Jinja for chat templates.

use std::borrow::Cow;

use minijinja::{
    Environment, Error, ErrorKind, State, UndefinedBehavior, Value,
    syntax::SyntaxConfig,
    value::{Kwargs, Serde},
};
use regex::Regex;
use serde::Serialize;
use serde_json::ser::{Formatter, PrettyFormatter, Serializer};

use crate::{methods::call_method, namespaces::check_namespaces, paid_text::PaidText};

pub(crate) const TEMPLATE_NAME: &str = "chat_template";

/// Template instructions, or 64 bytes each of text, for one conversation. More count as an endless
/// loop.
const FUEL_PER_CONVERSATION: u64 = 2_000_000;
const MESSAGE_CHARS_MAX: usize = 1000;
const TIME_FORMAT_BYTES_MAX: usize = 1000;

/// Builds an environment with the functions of transformers; its `strftime_now` formats the time of
/// `clock`.
pub(crate) fn build_environment(
    template: &str,
    clock: impl Fn() -> jiff::Zoned + Send + Sync + 'static,
) -> Result<Environment<'static>, Error> {
    let mut environment = Environment::new();
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?;
    let template = replace_generation_tags(template);
    check_namespaces(&template, syntax.clone())?;
    environment.set_syntax(syntax);
    environment.set_undefined_behavior(UndefinedBehavior::Lenient);
    environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    environment.set_fuel(Some(FUEL_PER_CONVERSATION));
    environment.set_unknown_method_callback(call_method);
    environment.add_filter("tojson", to_json);
    // Values that are no texts may be of any length as texts.
    environment.add_function("raise_exception", |message: Value| -> Result<Value, Error> {
        let message = message.as_str().unwrap_or("the message is no text");
        let message: String = message.chars().take(MESSAGE_CHARS_MAX).collect();
        Err(Error::new(ErrorKind::InvalidOperation, message))
    });
    environment.add_function("strftime_now", move |format: Value| -> Result<String, Error> {
        let wrong = |problem: String| {
            Error::new(ErrorKind::InvalidOperation, format!("strftime_now: {problem}"))
        };
        let text = format.as_str().filter(|text| text.len() <= TIME_FORMAT_BYTES_MAX);
        let text = text.ok_or_else(|| wrong("the format is no text, or too long".to_owned()))?;
        jiff::fmt::strtime::format(text, &clock()).map_err(|error| wrong(error.to_string()))
    });
    environment.add_template_owned(TEMPLATE_NAME, template.into_owned())?;
    Ok(environment)
}

/// The tags `{% generation %}` and `{% endgeneration %}` mark the text of an assistant and write
/// nothing; they are replaced by an `if true` block.
fn replace_generation_tags(template: &str) -> Cow<'_, str> {
    if !template.contains("generation") {
        return Cow::Borrowed(template);
    }
    let mark = |name: &str| {
        Regex::new(&format!(r"\{{%([-+]?)\s*{name}\s*([-+]?)%\}}")).expect("a regular expression")
    };
    let begun = mark("generation").replace_all(template, "{%$1 if true $2%}").into_owned();
    Cow::Owned(mark("endgeneration").replace_all(&begun, "{%$1 endif $2%}").into_owned())
}

/// Formats like Python's `json.dumps(value, ensure_ascii=False, indent=indent)`.
fn to_json(state: &State<'_, '_>, value: &Value, arguments: Kwargs) -> Result<String, Error> {
    let indent: Option<usize> = arguments.get("indent")?;
    // The arguments ensure_ascii, separators and sort_keys, which some templates pass, have no
    // effect.
    let pay = |fuel| state.consume_fuel(fuel);
    let mut written = PaidText::new(&pay);
    let serialized = match indent {
        None => write_json(value, &mut written, SpacedFormatter),
        Some(spaces) => {
            let indent = " ".repeat(spaces.min(64));
            write_json(value, &mut written, PrettyFormatter::with_indent(indent.as_bytes()))
        }
    };
    let written = written.into_text()?;
    let wrong = |error| Error::new(ErrorKind::BadSerialization, format!("tojson: {error}"));
    serialized.map_err(wrong)?;
    Ok(written)
}

fn write_json(
    value: &Value,
    to: &mut PaidText<'_>,
    style: impl Formatter,
) -> serde_json::Result<()> {
    Serde(value).0.serialize(&mut Serializer::with_formatter(to, style))
}

/// One space after `,` and `:`, such as `[1, {"a": 2}]`.
struct SpacedFormatter;

impl Formatter for SpacedFormatter {
    fn begin_array_value<W: std::io::Write + ?Sized>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        writer.write_all(if first { b"" } else { b", " })
    }

    fn begin_object_key<W: std::io::Write + ?Sized>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        writer.write_all(if first { b"" } else { b", " })
    }

    fn begin_object_value<W: std::io::Write + ?Sized>(
        &mut self,
        writer: &mut W,
    ) -> std::io::Result<()> {
        writer.write_all(b": ")
    }
}
