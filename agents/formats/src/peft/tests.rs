use super::*;

fn text(change: Value) -> String {
    let mut map = json!({
        "peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["v_proj", "q_proj"],
        "bias": "none", "use_dora": false, "rank_pattern": {}, "alpha_pattern": {},
        "loftq_config": {}, "modules_to_save": null, "qalora_group_size": 16,
        "megatron_core": "megatron.core", "peft_version": "0.21.2", "lora_dropout": 0.05,
    });
    let map = map.as_object_mut().unwrap();
    map.append(&mut change.as_object().unwrap().clone());
    json!(map).to_string()
}

fn parsed(change: Value) -> Result<AdapterSettings, AdapterSettingsError> {
    AdapterSettings::parse(&text(change), Path::new("adapter_config.json"))
}

#[test]
fn the_scale_follows_rslora_and_alpha_pattern() {
    let scale =
        |change, layer, rank| parsed(change).unwrap().module_scale(layer, LayerModule::Query, rank);
    assert_eq!(scale(json!({}), 0, 8), 2.0);
    assert_eq!(scale(json!({}), 0, 4), 4.0);
    assert_eq!(scale(json!({"use_rslora": true}), 0, 4), 8.0);
    let pattern = json!({"alpha_pattern": {"layers.1.self_attn.q_proj": 4.0, "v_proj": 1.0}});
    assert_eq!(scale(pattern.clone(), 0, 8), 2.0);
    assert_eq!(scale(pattern.clone(), 1, 8), 0.5);
    assert_eq!(scale(pattern, 11, 8), 2.0);
}

#[test]
fn the_rank_follows_rank_pattern() {
    let pattern = json!({"rank_pattern": {".*\\.[12]\\..*q_proj": 2, "down_proj": 32}});
    let settings = parsed(pattern).unwrap();
    let rank = |layer, module| settings.module_rank(layer, module);
    assert_eq!((rank(0, LayerModule::Query), rank(1, LayerModule::Query)), (8, 2));
    assert_eq!((rank(12, LayerModule::Query), rank(12, LayerModule::Down)), (8, 32));
}

#[test]
fn what_is_written_is_read_again() {
    let change = json!({
        "target_modules": "all-linear", "exclude_modules": ["o_proj"], "layers_to_transform": [1, 2],
        "use_rslora": true, "lora_alpha": 9.5,
    });
    let text = text(change).replace(
        r#""alpha_pattern":{}"#,
        r#""alpha_pattern":{"z.*":3,"layers.1.self_attn.q_proj":4.0,"q_proj":5}"#,
    );
    let settings = AdapterSettings::parse(&text, Path::new("")).unwrap();
    let written = settings.to_text("base");
    let again = AdapterSettings::parse(&written, Path::new("")).unwrap();
    assert_eq!(again.to_text("base"), written);
    assert!(
        again.module_scale(1, LayerModule::Query, 1) == 4.0
            && again.module_scale(0, LayerModule::Query, 1) == 5.0
    );
    let value: Value = serde_json::from_str(&written).unwrap();
    assert_eq!(value["target_modules"], "all-linear");
    assert_eq!(value["layers_to_transform"], json!([1, 2]));
    assert_eq!(value["exclude_modules"], json!(["o_proj"]));
    assert_eq!(value["base_model_name_or_path"], "base");
    let plain = parsed(json!({})).unwrap().to_text("base");
    let spec = LoraSpec {
        rank: 8,
        alpha: 16.0,
        modules: [LayerModule::Query, LayerModule::Value].into(),
        rslora: false,
    };
    assert_eq!(plain, AdapterSettings::from_spec(&spec).to_text("base"));
}

#[test]
fn adapters_of_other_kinds_are_refused_by_name() {
    for (field, value) in [
        ("peft_type", json!("LOHA")),
        ("use_dora", json!(true)),
        ("bias", json!("lora_only")),
        ("lora_bias", json!(true)),
        ("modules_to_save", json!(["lm_head"])),
        ("init_lora_weights", json!("pissa_niter_4")),
        ("init_lora_weights", json!("eva")),
        ("layer_replication", json!([[0, 4]])),
        ("fan_in_fan_out", json!(true)),
        ("trainable_token_indices", json!([3])),
        ("target_parameters", json!(["mlp.experts.gate_up_proj"])),
        ("alora_invocation_tokens", json!([1, 2])),
        ("use_bdlora", json!({"nblocks": 2})),
        ("loftq_config", json!({"loftq_bits": 4})),
        ("r", json!(0)),
        ("lora_alpha", json!("big")),
        ("target_modules", json!(null)),
        ("alpha_pattern", json!({"q_proj": 0})),
        ("alpha_pattern", json!({"(?=q)q_proj": 3})),
        ("rank_pattern", json!({"q_proj": 2.5})),
        ("a_setting_of_tomorrow", json!("on")),
        ("another_of_tomorrow", json!(1)),
    ] {
        let error = parsed(json!({field: value})).unwrap_err().to_string();
        assert!(error.contains(&format!("`{field}`")), "{error}");
    }
    parsed(json!({"a_setting_of_tomorrow": false, "another_of_tomorrow": null})).unwrap();
}
