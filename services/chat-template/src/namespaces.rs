//! Refuses templates in which a namespace can contain itself: such a value is shown and compared
//! without end, which no fuel pays for.

use std::collections::BTreeSet;

use minijinja::{
    Error, ErrorKind,
    machinery::{Token, tokenize},
    syntax::SyntaxConfig,
};

const FUNCTION: &str = "namespace";

/// Checks that a namespace is only created by `{% set NAME = namespace(…) %}`, and that only
/// attributes of `NAME` are used. Then no value contains a namespace.
///
/// # Errors
/// When a namespace is used as a value, or the template cannot be split into tokens.
pub(crate) fn check_namespaces(template: &str, syntax: SyntaxConfig) -> Result<(), Error> {
    let tokens = tokenize(template, false, syntax).map(|found| found.map(|(token, _)| token));
    let tokens = TemplateTokens(tokens.collect::<Result<_, _>>()?);
    let created = (0..tokens.0.len()).filter(|at| tokens.creates_namespace(*at));
    let names: BTreeSet<&str> = created.filter_map(|at| tokens.identifier(at - 2)).collect();
    for at in 0..tokens.0.len() {
        let Some(name) = tokens.identifier(at) else { continue };
        let is_attribute = at > 0 && matches!(tokens.0[at - 1], Token::Dot);
        // A keyword, or a name that gets another value.
        let is_assigned = matches!(tokens.0.get(at + 1), Some(Token::Assign));
        let is_allowed = is_attribute
            || is_assigned
            || match name {
                FUNCTION => tokens.creates_namespace(at),
                name if names.contains(name) => matches!(
                    tokens.0.get(at + 1),
                    Some(Token::Dot | Token::BracketOpen | Token::Ident("is"))
                ),
                _ => true,
            };
        if !is_allowed {
            let message = format!(
                "the namespace {name} is used as a value; write {{% set NAME = namespace(…) %}}, and \
                 use only attributes of NAME"
            );
            return Err(Error::new(ErrorKind::InvalidOperation, message));
        }
    }
    Ok(())
}

struct TemplateTokens<'a>(Vec<Token<'a>>);

impl<'a> TemplateTokens<'a> {
    fn identifier(&self, at: usize) -> Option<&'a str> {
        match self.0.get(at) {
            Some(Token::Ident(name)) => Some(*name),
            _ => None,
        }
    }

    /// Returns true for the function's name in `{% set NAME = namespace(…) %}`.
    fn creates_namespace(&self, at: usize) -> bool {
        at >= 3
            && self.identifier(at) == Some(FUNCTION)
            && matches!(self.0[at - 1], Token::Assign)
            && self.identifier(at - 3) == Some("set")
            && self
                .call_end(at + 1)
                .is_some_and(|end| matches!(self.0.get(end), Some(Token::BlockEnd)))
    }

    /// Returns the place after the parenthesis that closes the one at a place.
    fn call_end(&self, opened: usize) -> Option<usize> {
        let mut depth = 0_usize;
        for (at, token) in self.0.iter().enumerate().skip(opened) {
            match token {
                Token::ParenOpen => depth += 1,
                Token::ParenClose => depth = depth.checked_sub(1)?,
                _ => {}
            }
            if depth == 0 {
                return (at > opened).then_some(at + 1);
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_attributes_of_namespaces_are_used() {
        let check = |text: &str| check_namespaces(text, SyntaxConfig::default());
        for text in [
            "{% set ns = namespace(a=1, b=(2, [3])) %}{% set ns.a = ns.b[0] + ns['a'] %}{{ ns.a }}",
            "{%- set ns = namespace() -%}{% if ns is defined and m.ns %}{{ f(ns=1) }}{% endif %}",
            "ns = namespace {{ x.namespace }}{{ 'namespace' }}{% set x = [x] %}",
        ] {
            check(text).unwrap();
        }
        let set = "{% set ns = namespace(a=1) %}";
        for text in [
            "{% set ns.a = ns %}",
            "{% set ns.a = [ns] %}",
            "{% set a = ns %}",
            "{{ ns }}",
            "{{ ns | string }}",
            "{{ ns == ns }}",
            "{% for ns in messages %}{% endfor %}",
            "{% set a = namespace(x=ns) %}",
            "{% set f = namespace %}",
            "{{ namespace() }}",
            "{% set a, b = namespace(), 1 %}",
            "{% set a = namespace(), 1 %}",
            "{% set a = [namespace()] %}",
            "{% set a = namespace(x=namespace()) %}",
        ] {
            let error = check(&format!("{set}{text}")).unwrap_err().to_string();
            assert!(error.contains("is used as a value"), "{text}: {error}");
        }
    }
}
