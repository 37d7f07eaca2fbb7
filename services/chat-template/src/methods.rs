//! The methods of Python's types, with a bound on what they take.

use std::fmt::Write;

use minijinja::{
    Error, ErrorKind, State, Value,
    value::{ValueKind, from_args},
};
use minijinja_contrib::pycompat::unknown_method_callback;

use crate::paid_text::{BYTES_PER_FUEL, PaidText};

/// The longest text of a number without a width or a precision.
const NUMBER_BYTES_MAX: usize = 400;
/// For each part of a joined text.
const JOIN_FUEL: u64 = 4;

/// Calls a method. A text is paid for, because a method reads all of it.
pub(crate) fn call_method(
    state: &mut State<'_, '_>,
    value: &Value,
    method: &str,
    arguments: &[Value],
) -> Result<Value, Error> {
    if let Some(text) = value.as_str() {
        pay_bytes(state, text.len())?;
        match method {
            "join" => return join_texts(state, text, arguments),
            "format" => pay_format(state, text, arguments)?,
            _ => {}
        }
    }
    unknown_method_callback(state, value, method, arguments)
}

fn pay_bytes(state: &State<'_, '_>, bytes: usize) -> Result<(), Error> {
    state.consume_fuel((bytes / BYTES_PER_FUEL) as u64)
}

fn join_texts(state: &State<'_, '_>, separator: &str, arguments: &[Value]) -> Result<Value, Error> {
    let (values,): (&Value,) = from_args(arguments)?;
    let pay = |fuel| state.consume_fuel(fuel);
    let mut joined = PaidText::new(&pay);
    for (number, value) in values.try_iter()?.checked().enumerate() {
        let value = value?;
        state.consume_fuel(JOIN_FUEL)?;
        let separator = if number == 0 { "" } else { separator };
        if write!(joined, "{separator}{value}").is_err() {
            break;
        }
    }
    joined.into_text().map(Value::from)
}

/// Pays for the text that `str.format` is about to write. Each field shows an argument, filled up to
/// a width or a precision.
fn pay_format(state: &State<'_, '_>, text: &str, arguments: &[Value]) -> Result<(), Error> {
    let mut shown = Vec::new();
    for argument in arguments {
        match argument.is_kwargs() {
            true => {
                for name in argument.try_iter()? {
                    shown.push(argument.get_item(&name)?);
                }
            }
            false => shown.push(argument.clone()),
        }
    }
    // Others have parts of any length, which a field can name.
    let is_plain = |value: &Value| {
        use ValueKind::{Bool, None, Number, String};
        matches!(value.kind(), String | Number | Bool | None)
    };
    if !shown.iter().all(is_plain) {
        let message = "str.format takes texts and numbers here";
        return Err(Error::new(ErrorKind::InvalidOperation, message));
    }
    let lengths = shown.iter().filter_map(Value::as_str).map(str::len);
    let longest = lengths.max().unwrap_or(0).max(NUMBER_BYTES_MAX);
    let widths = text.split(|letter: char| !letter.is_ascii_digit()).filter(|it| !it.is_empty());
    let widths = widths.map(|digits| digits.parse().unwrap_or(usize::MAX));
    let fields = text.matches('{').count().saturating_mul(longest);
    pay_bytes(state, widths.fold(fields, usize::saturating_add))
}
