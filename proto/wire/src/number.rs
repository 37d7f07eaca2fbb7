//! Deserialises numbers of proto3 JSON, which may be JSON numbers or strings (large integers,
//! `"NaN"`, `"Infinity"`).
//!
//! pbjson's own reader first tries a string and creates an error for each JSON number, which took
//! more than half of the time to read a fact.

use std::{fmt, marker::PhantomData, str::FromStr};

use serde::{
    Deserialize, Deserializer,
    de::{Error, IntoDeserializer, Visitor},
};

/// A number as generated code deserialises it in place of pbjson's.
pub(crate) struct Number<T>(pub(crate) T);

struct NumberVisitor<T>(PhantomData<T>);

impl<'de, T> Deserialize<'de> for Number<T>
where
    T: FromStr<Err: fmt::Display> + Deserialize<'de>,
{
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(NumberVisitor(PhantomData)).map(Self)
    }
}

impl<'de, T> Visitor<'de> for NumberVisitor<T>
where
    T: FromStr<Err: fmt::Display> + Deserialize<'de>,
{
    type Value = T;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a number, or a string that is one")
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<T, E> {
        T::deserialize(value.into_deserializer())
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<T, E> {
        T::deserialize(value.into_deserializer())
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<T, E> {
        T::deserialize(value.into_deserializer())
    }

    fn visit_str<E: Error>(self, value: &str) -> Result<T, E> {
        value.parse().map_err(E::custom)
    }
}

#[cfg(test)]
mod tests {
    use pbjson::private::NumberDeserialize;

    use super::*;

    fn reads_as_pbjson_does<T>(text: &str)
    where
        T: FromStr<Err: std::error::Error> + for<'de> Deserialize<'de> + fmt::Debug,
    {
        let ours = serde_json::from_str::<Number<T>>(text).map(|number| number.0).ok();
        let theirs = serde_json::from_str::<NumberDeserialize<T>>(text).map(|number| number.0).ok();
        // As text, for one that is none equals nothing.
        assert_eq!(format!("{ours:?}"), format!("{theirs:?}"), "{text}");
    }

    #[test]
    fn numbers_are_read_as_pbjson_reads_them() {
        let texts = [
            "0",
            "7",
            "-7",
            "4294967296",
            "18446744073709551615",
            "-9223372036854775808",
            "1.5",
            "2.0",
            "1e300",
            "-0.1",
            r#""7""#,
            r#""-7""#,
            r#""1.5""#,
            r#""18446744073709551616""#,
            r#""NaN""#,
            r#""Infinity""#,
            r#""-Infinity""#,
            r#""""#,
            r#"" 7""#,
            "null",
            "true",
            "[]",
            "{}",
        ];
        for text in texts {
            reads_as_pbjson_does::<i32>(text);
            reads_as_pbjson_does::<u32>(text);
            reads_as_pbjson_does::<i64>(text);
            reads_as_pbjson_does::<u64>(text);
            reads_as_pbjson_does::<f32>(text);
            reads_as_pbjson_does::<f64>(text);
        }
    }
}
