use super::*;

fn parsed(change: impl FnOnce(&mut Map<String, Value>)) -> Result<ModelConfig, ModelConfigError> {
    let mut map = json!({
        "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "vocab_size": 260,
        "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
        "rope_theta": 5e5, "tie_word_embeddings": true, "eos_token_id": [256, 258],
    });
    let map = map.as_object_mut().unwrap();
    change(map);
    ModelConfig::from_json(map, Path::new("config.json"))
}

fn with(change: Value) -> Result<ModelConfig, ModelConfigError> {
    parsed(|map| map.extend(change.as_object().unwrap().clone()))
}

fn written_and_read(config: &ModelConfig) -> ModelConfig {
    ModelConfig::from_json(config.to_json().as_object().unwrap(), Path::new("")).unwrap()
}

#[test]
fn both_generations_of_rope_settings_are_read_and_written() {
    let old = parsed(|_| {}).unwrap();
    assert_eq!((old.rope_theta, old.eos_tokens.as_slice()), (5e5, [256, 258].as_slice()));
    let new = parsed(|map| {
        map.remove("rope_theta");
        map.insert("rope_parameters".into(), json!({"rope_theta": 5e5, "rope_type": "default"}));
    });
    assert_eq!(new.unwrap(), old);
    assert_eq!(written_and_read(&old), old);
}

#[test]
fn llama_s_scaling_is_read_from_both_generations() {
    let llama = json!({"model_type": "llama", "architectures": null, "attention_bias": true});
    let scaling = json!({
        "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192, "rope_type": "llama3",
    });
    let config = |field: &str, scaling: Value| {
        let mut change = llama.clone();
        change[field] = scaling;
        with(change).unwrap()
    };
    let old = config("rope_scaling", scaling.clone());
    let expected = RopeScaling {
        factor: 32.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_positions: 8192,
    };
    assert_eq!((old.rope_theta, old.rope_scaling), (5e5, Some(expected)));
    let mut new = scaling;
    new["rope_theta"] = json!(5e5);
    assert_eq!(config("rope_parameters", new), old);
    assert_eq!(written_and_read(&old), old);
    assert!(old.has_bias(LayerModule::Output) && !old.has_bias(LayerModule::Up));
}

#[test]
fn qwen3_s_heads_are_as_wide_as_its_file_says() {
    let qwen3 = |change: Value| {
        let mut all = json!({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]});
        all.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
        with(all).unwrap()
    };
    let config = qwen3(json!({"head_dim": 64}));
    assert_eq!((config.head_dim, config.has_bias(LayerModule::Query)), (64, false));
    assert_eq!(qwen3(json!({})).head_dim, 128);
    let biased = qwen3(json!({"attention_bias": true}));
    assert!(biased.has_bias(LayerModule::Query) && biased.has_bias(LayerModule::Output));
    assert_eq!(written_and_read(&biased), biased);
    // Two tables and norms of 128, q and o of 256 by 128, k and v of 128 by 128, three of 352 by
    // 128, and two head norms of 64.
    let untied = qwen3(json!({"head_dim": 64, "tie_word_embeddings": false}));
    let layer = 2 * 256 * 128 + 2 * 128 * 128 + 3 * 352 * 128 + 2 * 128 + 2 * 64;
    assert_eq!(untied.count_parameters(), 4 * layer + 2 * 260 * 128 + 128);
}

#[test]
fn a_window_that_no_layer_uses_does_not_matter() {
    let unused = json!({"use_sliding_window": false, "sliding_window": 32768});
    assert_eq!(with(unused).unwrap(), parsed(|_| {}).unwrap());
    let full = json!({"layer_types": vec!["full_attention"; 4], "sliding_window": null});
    assert_eq!(with(full).unwrap(), parsed(|_| {}).unwrap());
    let mixed = json!({"layer_types": ["full_attention", "sliding_attention"]});
    assert!(with(mixed).unwrap_err().to_string().contains("layer_types `sliding_attention`"));
}

#[test]
fn what_is_wrong_or_not_computed_is_refused_by_name() {
    let llama3 = |low: f64| {
        json!({
            "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": low,
            "original_max_position_embeddings": 8192, "rope_type": "llama3",
        })
    };
    for (field, value, expected) in [
        ("model_type", json!("gemma3n"), "use a model of gemma2, gemma3_text"),
        ("model_type", json!("falcon"), "qwen2, qwen3, llama, mistral"),
        ("architectures", json!(["Qwen2ForRewardModel"]), "Qwen2ForRewardModel"),
        ("hidden_size", Value::Null, "`hidden_size` is missing"),
        ("hidden_size", json!(-5), "`hidden_size` is -5"),
        ("num_hidden_layers", json!(1e18), "`num_hidden_layers`"),
        ("num_attention_heads", json!(0), "`num_attention_heads` is 0"),
        ("num_key_value_heads", json!(3), "a divisor of"),
        ("head_dim", json!(7), "an even number"),
        ("rope_scaling", json!({"rope_type": "yarn", "factor": 4.0}), "yarn"),
        ("rope_parameters", json!({"full_attention": {"rope_theta": 1e4}}), "one rope for all"),
        ("rope_parameters", json!([1]), "an object"),
        ("rope_parameters", json!({"partial_rotary_factor": 0.5}), "partial_rotary_factor"),
        ("rope_scaling", llama3(4.0), "more than low_freq_factor"),
        ("rope_scaling", json!({"rope_type": "llama3"}), "`factor` is missing"),
        ("use_sliding_window", json!(true), "use_sliding_window"),
        ("mlp_bias", json!(true), "mlp_bias"),
        ("hidden_act", json!("gelu"), "gelu"),
        ("eos_token_id", json!(260), "within vocab_size"),
        ("rms_norm_eps", json!("small"), "`rms_norm_eps`"),
        ("quantization_config", json!({"quant_method": "gptq"}), "are quantised (gptq)"),
        ("quantization_config", json!({"load_in_4bit": true}), "use the model that they were made"),
    ] {
        let error = with(json!({field: value})).unwrap_err().to_string();
        assert!(error.contains(expected), "{field}: {error}");
    }
}

#[test]
fn what_the_tokenizer_calls_the_end_comes_first_if_generation_stops_there() {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, value: &Value| {
        std::fs::write(dir.path().join(name), value.to_string()).unwrap();
    };
    write("config.json", &with(json!({"eos_token_id": [1, 8, 9]})).unwrap().to_json());
    let ends = || ModelConfig::from_dir(dir.path()).unwrap().eos_tokens;
    assert_eq!(ends(), [1, 8, 9]);
    let added =
        json!({"added_tokens": [{"id": 9, "content": "<|eot|>"}, {"id": 7, "content": "x"}]});
    write("tokenizer.json", &added);
    write("tokenizer_config.json", &json!({"eos_token": {"content": "<|eot|>"}}));
    assert_eq!(ends(), [9, 1, 8]);
    let decoder = json!({"8": {"content": "<|eom|>"}});
    write(
        "tokenizer_config.json",
        &json!({"eos_token": "<|eom|>", "added_tokens_decoder": decoder}),
    );
    assert_eq!(ends(), [8, 1, 9]);
    write("tokenizer_config.json", &json!({"eos_token": "x"}));
    assert_eq!(ends(), [1, 8, 9], "generation does not stop at it");
    write("tokenizer_config.json", &json!({"eos_token": null}));
    assert_eq!(ends(), [1, 8, 9]);
}

#[test]
fn a_model_that_needs_code_of_its_directory_is_refused_with_the_file() {
    let code = json!({
        "model_type": "phi4mm", "auto_map": {"AutoConfig": "someone/x--configuration_phi4mm.Phi"},
    });
    let error = with(code).unwrap_err().to_string();
    for part in ["configuration_phi4mm.py", "never run", "use a model of phi3"] {
        assert!(error.contains(part), "{error}");
    }
    let unused = json!({"auto_map": {"AutoConfig": "configuration_qwen2.Qwen2Config"}});
    assert_eq!(with(unused).unwrap(), parsed(|_| {}).unwrap(), "transformers knows the model");
}

fn of_kind(kind: &str, class: &str, change: Value) -> Result<ModelConfig, ModelConfigError> {
    let mut all = json!({"model_type": kind, "architectures": [class]});
    all.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
    with(all)
}

fn gemma3(change: Value) -> Result<ModelConfig, ModelConfigError> {
    let mut all = json!({
        "hidden_activation": "gelu_pytorch_tanh", "head_dim": 32, "query_pre_attn_scalar": 32,
        "sliding_window": 64, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
    });
    all.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
    of_kind("gemma3_text", "Gemma3ForCausalLM", all)
}

#[test]
fn both_ropes_of_gemma_are_read_from_both_generations() {
    let linear = json!({"rope_scaling": {"rope_type": "linear", "factor": 8.0}});
    let old = gemma3(linear).unwrap();
    assert_eq!((old.rope_theta, old.details.local_rope_theta), (1e6, Some(1e4)));
    assert_eq!(old.details.linear_rope_factor, Some(8.0));
    let new = json!({"rope_theta": null, "rope_local_base_freq": null, "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }});
    assert_eq!(gemma3(new).unwrap(), old);
    for (change, expected) in [
        (json!({"layer_types": ["full_attention"]}), "layer_types `full_attention`"),
        (json!({"sliding_window_pattern": 4}), "sliding_window_pattern `4`"),
        (json!({"query_pre_attn_scalar": 168}), "the size of a head"),
        (json!({"rope_scaling": {"rope_type": "yarn"}}), "default, linear"),
        (json!({"attention_bias": true}), "attention_bias"),
        (json!({"hidden_activation": "silu"}), "gelu_pytorch_tanh"),
    ] {
        let error = gemma3(change).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}

/// The fields of google/gemma-3-4b-it that decide what its text part computes, with others.
fn gemma3_with_images(change: Value) -> Result<ModelConfig, ModelConfigError> {
    let mut all = json!({
        "architectures": ["Gemma3ForConditionalGeneration"], "eos_token_id": [1, 106],
        "model_type": "gemma3",
        "text_config": {
            "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
            "num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
    });
    all.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
    ModelConfig::from_json(all.as_object().unwrap(), Path::new("config.json"))
}

#[test]
fn the_text_part_of_a_model_with_images_has_the_values_that_its_file_leaves_out() {
    let published = gemma3_with_images(json!({})).unwrap();
    let shape = [published.vocab_size, published.heads, published.kv_heads, published.head_dim];
    assert_eq!(shape, [262_208, 8, 4, 256]);
    assert_eq!((published.architecture, published.max_positions), (Architecture::Gemma3, 131_072));
    assert_eq!(published.count_parameters(), 3_880_263_168);
    assert_eq!(published.eos_tokens, [1, 106]);
    // transformers 5 writes all fields, and its default token.
    let complete = gemma3_with_images(json!({"text_config": {
        "eos_token_id": 1, "final_logit_softcapping": null, "head_dim": 256, "hidden_size": 2560,
        "intermediate_size": 10240, "max_position_embeddings": 131_072,
        "model_type": "gemma3_text", "num_attention_heads": 8, "num_hidden_layers": 34,
        "num_key_value_heads": 4, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        "sliding_window": 1024, "vocab_size": 262_208,
    }}));
    assert_eq!(complete.unwrap(), published);
    for (change, expected) in [
        (json!({"architectures": ["Gemma3ForSequenceClassification"]}), "Gemma3ForConditional"),
        (json!({"text_config": "small"}), "`text_config` is \"small\", expected an object"),
        (json!({"text_config": {"model_type": "qwen3"}}), "text_config.model_type `qwen3`"),
        (json!({"quantization_config": {"quant_method": "gptq"}}), "are quantised (gptq)"),
    ] {
        let error = gemma3_with_images(change).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn a_window_that_llama_cpp_lacks_ends_the_positions() {
    let of_window = |kind: &str, class: &str, window: Value| {
        of_kind(kind, class, json!({"sliding_window": window})).unwrap()
    };
    for (kind, class) in [("mistral", "MistralForCausalLM"), ("phi3", "Phi3ForCausalLM")] {
        assert_eq!(of_window(kind, class, json!(100)).max_positions, 100);
        assert_eq!(of_window(kind, class, json!(4096)).max_positions, 512);
        assert_eq!(of_window(kind, class, Value::Null).max_positions, 512);
    }
}

#[test]
fn factors_of_phi_s_rope_must_fit_its_heads() {
    let phi3 = |rope: Value| {
        let all = json!({"original_max_position_embeddings": 256, "rope_scaling": rope});
        of_kind("phi3", "Phi3ForCausalLM", all)
    };
    let rope = |count: usize| json!({"type": "longrope", "long_factor": vec![2.0; count], "short_factor": vec![1; count]});
    let config = phi3(rope(16)).unwrap();
    let long = config.details.long_rope.unwrap();
    // The positions were doubled: the square root of 1 + ln 2 / ln 256.
    assert!((long.attention_factor - (1.125_f64).sqrt()).abs() < 1e-9, "{long:?}");
    for (rope, expected) in [
        (rope(15), "15 numbers"),
        (json!({"type": "longrope", "long_factor": [1, -1]}), "`long_factor`"),
        (json!({"type": "yarn"}), "longrope"),
    ] {
        let error = phi3(rope).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn experts_that_llama_cpp_computes_otherwise_are_refused() {
    let moe = |change: Value| {
        let mut all = json!({
            "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
            "norm_topk_prob": true,
        });
        all.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
        of_kind("qwen3_moe", "Qwen3MoeForCausalLM", all)
    };
    let experts = moe(json!({"num_experts": null, "num_local_experts": 8})).unwrap();
    let expected = ExpertShape { count: 8, used: 2, width: 32 };
    assert_eq!(experts.details.experts, Some(expected));
    for (change, expected) in [
        (json!({"norm_topk_prob": false}), "norm_topk_prob"),
        (json!({"mlp_only_layers": [0]}), "mlp_only_layers"),
        (json!({"decoder_sparse_step": 2}), "decoder_sparse_step"),
        (json!({"num_experts_per_tok": 9}), "at most num_experts"),
    ] {
        let error = moe(change).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn settings_of_any_size_are_not_read() {
    let dir = tempfile::tempdir().unwrap();
    let long = format!("{{\"model_type\": \"{}\"}}", "a".repeat(33 << 20));
    std::fs::write(dir.path().join("config.json"), long).unwrap();
    let error = ModelConfig::from_dir(dir.path()).unwrap_err();
    let cause = std::error::Error::source(&error).unwrap().to_string();
    assert!(cause.contains("more than 33554432 bytes"), "{error}: {cause}");
}
