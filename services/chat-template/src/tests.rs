use std::{collections::BTreeMap, path::Path};

use serde::Deserialize;
use serde_json::json;
use wire::v1;

use super::*;

const TEMPLATES: [(&str, &str); 6] = [
    ("chatml", include_str!("golden/chatml.jinja")),
    ("headers", include_str!("golden/headers.jinja")),
    ("inst", include_str!("golden/inst.jinja")),
    ("loose", include_str!("golden/loose.jinja")),
    ("thinking", include_str!("golden/thinking.jinja")),
    ("turns", include_str!("golden/turns.jinja")),
];

/// Written by tests/torch/chat.py.
#[derive(Deserialize)]
struct Golden {
    conversations: BTreeMap<String, Vec<ChatMessage>>,
    rendered: Vec<Rendered>,
}

#[derive(Deserialize)]
struct Rendered {
    template: String,
    conversation: String,
    answer_next: bool,
    /// `None` if the template refuses the conversation.
    text: Option<String>,
}

fn golden() -> Golden {
    serde_json::from_str(include_str!("golden/golden.json")).unwrap()
}

fn noon() -> jiff::Zoned {
    jiff::civil::date(2026, 3, 7).at(12, 0, 0, 0).to_zoned(jiff::tz::TimeZone::UTC).unwrap()
}

fn write(dir: &Path, name: &str, value: &serde_json::Value) {
    std::fs::write(dir.join(name), value.to_string()).unwrap();
}

/// Writes a model's small files. With `begins`, the tokenizer puts a token before texts.
fn model(template: &str, eos: &serde_json::Value, begins: bool) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let tokens = ["<s>", "</s>", "<|im_end|>", "<|im_start|>", "<|eot_id|>", "<end_of_turn>"];
    let vocab = tokens.iter().chain(&["?"]).enumerate();
    let vocab: BTreeMap<&str, usize> = vocab.map(|(id, text)| (*text, id)).collect();
    let added = tokens.iter().enumerate().map(|(id, text)| {
        json!({"id": id, "content": text, "special": true, "normalized": false,
               "single_word": false, "lstrip": false, "rstrip": false})
    });
    let single = json!([{"SpecialToken": {"id": "<s>", "type_id": 0}},
                        {"Sequence": {"id": "A", "type_id": 0}}]);
    let pair =
        json!([{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}]);
    let tokens = json!({"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}});
    let step = json!({"type": "TemplateProcessing", "single": single, "pair": pair,
                      "special_tokens": tokens});
    let bytes = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false,
                       "use_regex": false});
    let steps = json!({"type": "Sequence", "processors": [bytes, step]});
    let tokenizer = json!({
        "version": "1.0", "added_tokens": added.collect::<Vec<_>>(),
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": if begins { steps } else { bytes },
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "?"},
    });
    write(dir.path(), "tokenizer.json", &tokenizer);
    write(
        dir.path(),
        "tokenizer_config.json",
        &json!({"bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": null,
                "chat_template": template}),
    );
    write(
        dir.path(),
        "config.json",
        &json!({"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 32,
                "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
                "num_key_value_heads": 1, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
                "vocab_size": 260, "eos_token_id": eos}),
    );
    dir
}

fn chatml() -> ChatTemplate {
    template("chatml", &json!(2), false)
}

fn template(name: &str, eos: &serde_json::Value, begins: bool) -> ChatTemplate {
    let text = TEMPLATES.iter().find(|(known, _)| *known == name).unwrap().1;
    ChatTemplate::load(model(text, eos, begins).path(), noon).unwrap()
}

#[test]
fn conversations_are_written_as_transformers_writes_them() {
    let golden = golden();
    for (name, _) in TEMPLATES {
        let template = template(name, &json!(1), false);
        let mut seen = 0;
        for expected in golden.rendered.iter().filter(|rendered| rendered.template == name) {
            let messages = &golden.conversations[&expected.conversation];
            let text = template.render_messages(messages, expected.answer_next);
            let what = format!("{name}, {}, {}", expected.conversation, expected.answer_next);
            match (&expected.text, text) {
                (Some(expected), Ok(text)) => assert_eq!(text, *expected, "{what}"),
                (None, Err(_)) => {}
                (expected, text) => panic!("{what}: {text:?}, not {expected:?}"),
            }
            seen += 1;
        }
        assert!(seen >= 14, "{name}: {seen}");
    }
}

#[test]
fn a_refusal_carries_the_template_s_own_words() {
    let template = template("turns", &json!(1), false);
    let messages = &golden().conversations["system"];
    let error = template.render_prompt(messages).unwrap_err();
    let source = std::error::Error::source(&error).unwrap().to_string();
    assert!(source.contains("there is no system role"), "{source}");
}

#[test]
fn an_answer_is_what_follows_its_question_without_the_end() {
    let golden = golden();
    let pair = |name: &str, eos: serde_json::Value, conversation: &str| {
        template(name, &eos, false).render_pair(&golden.conversations[conversation]).unwrap()
    };
    let of = |prompt: &str, completion: &str| PromptCompletion {
        prompt: prompt.into(),
        completion: completion.into(),
    };
    assert_eq!(
        pair("chatml", json!(2), "system answered"),
        of(
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2+2=<|im_end|>\n\
             <|im_start|>assistant\n",
            "4"
        )
    );
    // Trainers append another token: the turn's own end stays.
    assert_eq!(pair("chatml", json!([1, 2]), "answered").completion, " 4 <|im_end|>");
    assert_eq!(
        pair("inst", json!(1), "turns"),
        of("<s>[INST] 2+2= [/INST] 4</s>[INST] And 3+3? [/INST]", " 6")
    );
    assert_eq!(pair("turns", json!(5), "answered").completion, "4");
    // Text that the template omits from earlier answers stays in the last one.
    let thoughts = pair("thinking", json!(2), "thoughts");
    assert_eq!(thoughts.completion, "<think>\nthree\n</think>\n\n6");
    assert!(thoughts.prompt.contains("assistant\n4<|im_end|>"), "{}", thoughts.prompt);
}

#[test]
fn a_beginning_that_the_tokenizer_adds_is_written_once() {
    let golden = golden();
    let question = &golden.conversations["question"];
    let adds = template("inst", &json!(1), true).render_prompt(question).unwrap();
    assert_eq!(adds, "[INST] 2+2= [/INST]");
    let adds_none = template("inst", &json!(1), false).render_prompt(question).unwrap();
    assert_eq!(adds_none, "<s>[INST] 2+2= [/INST]");
}

#[test]
fn what_is_written_is_tokenized_with_one_beginning_and_special_tokens_as_such() {
    let text = TEMPLATES.iter().find(|(name, _)| *name == "headers").unwrap().1;
    for begins in [true, false] {
        let dir = model(text, &json!([1, 4]), begins);
        let template = ChatTemplate::load(dir.path(), noon).unwrap();
        let prompt = template.render_prompt(&golden().conversations["turns"][..3]).unwrap();
        let tokenizer = tokenizers::Tokenizer::from_file(dir.path().join("tokenizer.json"));
        let tokens = tokenizer.unwrap().encode(prompt, true).unwrap().get_ids().to_vec();
        let count = |id: u32| tokens.iter().filter(|token| **token == id).count();
        assert_eq!((tokens[0], count(0), count(4)), (0, 1, 4), "{tokens:?}");
    }
}

#[test]
fn generation_must_stop_where_a_turn_ends() {
    for (name, eos, stops) in [
        ("chatml", json!(2), true),
        ("chatml", json!([1, 2]), true),
        ("chatml", json!(1), false),
        ("headers", json!([1, 4]), true),
        ("headers", json!(1), false),
        ("inst", json!(1), true),
    ] {
        let checked = template(name, &eos, false).check_end_token();
        assert_eq!(checked.is_ok(), stops, "{name}, {eos}: {checked:?}");
    }
    let error = template("headers", &json!(1), false).check_end_token().unwrap_err().to_string();
    assert!(error.contains("<|eot_id|>") && error.contains("generation_config.json"), "{error}");
}

#[test]
fn what_cannot_be_written_says_why() {
    let golden = golden();
    let chatml = template("chatml", &json!(2), false);
    let said = |role: &str, content: serde_json::Value| {
        serde_json::from_value::<ChatMessage>(json!({"role": role, "content": content})).unwrap()
    };
    let answered = chatml.render_prompt(&golden.conversations["answered"]).unwrap_err();
    assert!(matches!(answered, ChatError::Answered));
    let unanswered = chatml.render_pair(&golden.conversations["question"]).unwrap_err();
    assert!(matches!(unanswered, ChatError::Unanswered));
    let loose = template("loose", &json!(1), false);
    let unstable = loose.render_pair(&golden.conversations["answered"]).unwrap_err();
    assert!(unstable.to_string().contains("\"### Answer:\\n\""), "{unstable}");
    let image = json!([{"type": "image", "url": "x"}]);
    for (messages, what) in [
        (vec![], "expected a list"),
        (vec![ChatMessage::from(1)], "message 1: expected an object"),
        (vec![said("user", json!("a")), said("user", image)], "message 2: \"content\""),
        (vec![said("user", json!(null))], "message 1: \"content\""),
    ] {
        let error = chatml.render_prompt(&messages).unwrap_err().to_string();
        assert!(error.starts_with(what), "{error}");
    }
    let parts = json!([{"type": "text", "text": "2+"}, {"type": "text", "text": "2="}]);
    let whole = chatml.render_prompt(&[said("user", json!("2+2="))]).unwrap();
    assert_eq!(chatml.render_prompt(&[said("user", parts)]).unwrap(), whole);
}

#[test]
fn a_template_is_found_where_models_have_it_and_has_to_be_one() {
    let load = |dir: &Path| ChatTemplate::load(dir, noon);
    let named = json!([{"name": "tools", "template": "t"}, {"name": "default", "template": "d"}]);
    let dir = model("", &json!(1), false);
    let dir = dir.path();
    let settings = |value: serde_json::Value| write(dir, "tokenizer_config.json", &value);
    settings(json!({"chat_template": named}));
    assert_eq!(load(dir).unwrap().render_messages(&[], false).unwrap(), "d");
    std::fs::write(dir.join("chat_template.jinja"), "own").unwrap();
    assert_eq!(load(dir).unwrap().render_messages(&[], false).unwrap(), "own");
    std::fs::write(dir.join("chat_template.jinja"), "{% for %}").unwrap();
    assert!(matches!(load(dir), Err(TemplateError::Syntax(_))));
    std::fs::remove_file(dir.join("chat_template.jinja")).unwrap();
    settings(json!({"bos_token": "<s>"}));
    assert!(matches!(load(dir), Err(TemplateError::None)));
}

#[test]
fn a_template_that_does_not_end_is_stopped() {
    let text = "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}";
    let template = ChatTemplate::load(model(text, &json!(1), false).path(), noon).unwrap();
    assert!(matches!(template.render_messages(&[], false), Err(ChatError::Refused(_))));
}

#[test]
fn a_text_that_grows_without_an_end_is_stopped_before_it_takes_the_memory() {
    let render = |text: &str| {
        let text = text.replace("LONG", "(['a' * 1000000] * 100000000)");
        ChatTemplate::load(model(&text, &json!(1), false).path(), noon)
            .unwrap()
            .render_messages(&[], false)
    };
    for text in [
        "{{ LONG | tojson }}",
        "{{ LONG | tojson(indent=2) }}",
        "{{ ''.join(LONG) }}",
        "{{ ''.join([''] * 100000000) }}",
        "{{ '{:>100000000000000}'.format('a') }}",
        "{{ '{:.100000000000000f}'.format(a=1, b='b') }}",
        "{{ ('{0}' * 100000).format('a' * 1000000) }}",
        "{{ '{0}'.format(LONG) }}",
        "{{ '{a[0]}'.format(a=[1]) }}",
        "{{ raise_exception(LONG) }}",
        "{{ strftime_now(LONG) }}",
        "{{ strftime_now('%Y' * 100000) }}",
        // Its end takes hours if only the results count.
        "{% set a = 'a' * 9000000 %}{% for b in range(99999) %}{{ a.count('b') }}{% endfor %}",
    ] {
        let rendered = render(text);
        assert!(matches!(rendered, Err(ChatError::Refused(_))), "{text}: {rendered:?}");
    }
    let text = "{{ ', '.join(['a', 1]) }}; {{ '{:>3}|{b:.1f}'.format('a', b=2.5) }}";
    assert_eq!(render(text).unwrap(), "a, 1;   a|2.5");
}

#[test]
fn values_that_nest_deeply_do_not_overflow_the_stack() {
    let render = |text: &str| {
        let text = format!("{{% set ns = namespace(x=[]) %}}{text}");
        ChatTemplate::load(model(&text, &json!(1), false).path(), noon)
            .unwrap()
            .render_messages(&[], false)
    };
    let nest = "{% for i in range(99999) %}{% set ns.x = [ns.x] %}{% endfor %}";
    let shown = render(&format!("{nest}{{{{ ns.x }}}}")).unwrap();
    assert_eq!(shown.len(), 200_000);
    assert_eq!(render(&format!("{nest}{{{{ ns.x == [] }}}}")).unwrap(), "False");
    for text in ["{{ ns.x | tojson }}", nest, "{{ ns.x | string | length }}"] {
        // In the end without fuel.
        let rendered = render(&format!("{nest}{text}{nest}{nest}{nest}{nest}"));
        assert!(matches!(rendered, Err(ChatError::Refused(_))), "{text}");
    }
    let text = "{% set ns = namespace() %}{% set ns.x = ns %}{{ ns }}";
    let refused = ChatTemplate::load(model(text, &json!(1), false).path(), noon).unwrap_err();
    assert!(format!("{refused:?}").contains("the namespace ns is used as a value"), "{refused:?}");
}

#[test]
fn observations_are_written_between_the_end_of_a_turn_and_the_next_answer() {
    let texts = chatml().render_turn_texts("tool").unwrap();
    assert_eq!(texts.before, "\n<|im_start|>tool\n");
    assert_eq!(texts.after, "<|im_end|>\n<|im_start|>assistant\n");
    let environment = v1::verifier::Environment { max_turns: 3, ..Default::default() };
    let how = v1::verifier::How::Environment(environment);
    let verifier = texts.add_to_verifier(Some(v1::Verifier { how: Some(how) })).unwrap();
    let environment = verifier.environment().unwrap();
    assert_eq!((&environment.before_observation, environment.max_turns), (&texts.before, 3));
    let model = model(
        "{% for m in messages if m.role != 'tool' %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
        &json!(1),
        false,
    );
    let template = ChatTemplate::load(model.path(), noon).unwrap();
    let error = template.render_turn_texts("tool").unwrap_err().to_string();
    assert!(error.contains("role \"tool\"") && error.contains("role: user"), "{error}");
    assert_eq!(template.render_turn_texts("user").unwrap().before, "\nuser: ");
}
