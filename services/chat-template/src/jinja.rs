//! The functions and filters that Hugging Face's transformers adds to Jinja for chat templates.

use std::borrow::Cow;

use minijinja::{
    Environment, Error, ErrorKind, UndefinedBehavior, Value,
    syntax::SyntaxConfig,
    value::{Kwargs, Serde},
};
use minijinja_contrib::pycompat::unknown_method_callback;
use regex::Regex;
use serde::Serialize;
use serde_json::ser::{Formatter, PrettyFormatter, Serializer};

pub(crate) const TEMPLATE_NAME: &str = "chat_template";

/// Template instructions for one conversation. More count as an endless loop.
const FUEL_PER_CONVERSATION: u64 = 10_000_000;

/// Builds an environment with the functions of transformers; its `strftime_now` formats the time of
/// `clock`.
pub(crate) fn build_environment(
    template: &str,
    clock: impl Fn() -> jiff::Zoned + Send + Sync + 'static,
) -> Result<Environment<'static>, Error> {
    let mut environment = Environment::new();
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?;
    environment.set_syntax(syntax);
    environment.set_undefined_behavior(UndefinedBehavior::Lenient);
    environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    environment.set_fuel(Some(FUEL_PER_CONVERSATION));
    environment.set_unknown_method_callback(unknown_method_callback);
    environment.add_filter("tojson", to_json);
    environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, message))
    });
    environment.add_function("strftime_now", move |format: String| -> Result<String, Error> {
        let wrong = |error: jiff::Error| {
            Error::new(ErrorKind::InvalidOperation, format!("strftime_now: {error}"))
        };
        jiff::fmt::strtime::format(&format, &clock()).map_err(wrong)
    });
    environment
        .add_template_owned(TEMPLATE_NAME, replace_generation_tags(template).into_owned())?;
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
fn to_json(value: &Value, arguments: Kwargs) -> Result<String, Error> {
    let indent: Option<usize> = arguments.get("indent")?;
    // The arguments ensure_ascii, separators and sort_keys, which some templates pass, have no
    // effect.
    let mut written = Vec::new();
    let serialized = match indent {
        None => write_json(value, &mut written, SpacedFormatter),
        Some(spaces) => {
            let indent = " ".repeat(spaces.min(64));
            write_json(value, &mut written, PrettyFormatter::with_indent(indent.as_bytes()))
        }
    };
    let wrong = |error| Error::new(ErrorKind::BadSerialization, format!("tojson: {error}"));
    serialized.map_err(wrong)?;
    Ok(String::from_utf8(written).expect("JSON is UTF-8"))
}

fn write_json(value: &Value, to: &mut Vec<u8>, style: impl Formatter) -> serde_json::Result<()> {
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
