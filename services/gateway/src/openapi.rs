//! The services' JSON as OpenAPI 3.1 (spec.openapis.org), for what makes clients and forms of it. Told
//! from the descriptors that calls are read by, with the comments of the `.proto` files.

use std::collections::BTreeMap;

use axum::{Router, http::header, routing::get};
use bytes::Bytes;
use prost_reflect::{
    DescriptorPool, EnumDescriptor, FieldDescriptor, FileDescriptor, Kind, MessageDescriptor,
    MethodDescriptor, ServiceDescriptor,
};
use serde_json::{Map, Value, json};

pub(crate) const PATH: &str = "/openapi.json";

const PACKAGE: &str = "flotilla.v1";

pub(crate) fn routes(services: &DescriptorPool) -> Router {
    let document = Bytes::from(document(services).to_string());
    let answer = move || async { ([(header::CONTENT_TYPE, "application/json")], document) };
    Router::new().route(PATH, get(answer))
}

fn document(services: &DescriptorPool) -> Value {
    let ours = || services.services().filter(|service| service.package_name() == PACKAGE);
    let mut schemas = Schemas::default();
    let mut paths = Map::new();
    for service in ours() {
        for method in service.methods() {
            let path = format!("/{}/{}", service.full_name(), method.name());
            paths.insert(path, json!({ "post": operation(&service, &method, &mut schemas) }));
        }
    }
    let tags = ours().map(|service| {
        let about = comment(&service.parent_file(), service.path());
        json!({ "name": service.name(), "description": about })
    });
    json!({
        "openapi": "3.1.1",
        "info": {
            "title": "Flotilla",
            "version": PACKAGE,
            "description": "The control API of a fleet as JSON. A closed fleet asks each caller for a bearer.",
        },
        "security": [{}, { "bearer": [] }],
        "tags": tags.collect::<Vec<_>>(),
        "paths": paths,
        "components": {
            "securitySchemes": { "bearer": { "type": "http", "scheme": "bearer" } },
            "responses": { "failed": failed() },
            "schemas": schemas.done,
        },
    })
}

fn operation(
    service: &ServiceDescriptor,
    method: &MethodDescriptor,
    schemas: &mut Schemas,
) -> Value {
    let kind = match method.is_server_streaming() {
        true => "application/x-ndjson",
        false => "application/json",
    };
    let what = match method.is_server_streaming() {
        true => "One JSON object a line, as they come.",
        false => "The answer.",
    };
    json!({
        "operationId": format!("{}_{}", service.name(), method.name()),
        "tags": [service.name()],
        "description": comment(&service.parent_file(), method.path()),
        "requestBody": {
            "required": true,
            "content": { "application/json": { "schema": schemas.message(&method.input()) } },
        },
        "responses": {
            "200": {
                "description": what,
                "content": { kind: { "schema": schemas.message(&method.output()) } },
            },
            "default": { "$ref": "#/components/responses/failed" },
        },
    })
}

/// As `json::code` writes it.
fn failed() -> Value {
    let text = json!({ "type": "string" });
    let info = json!({ "type": "object", "properties": { "reason": text, "domain": text } });
    let detail =
        json!({ "type": "object", "properties": { "type": text, "value": text, "debug": info } });
    let error = json!({
        "type": "object",
        "required": ["code", "message"],
        "properties": { "code": text, "message": text, "details": { "type": "array", "items": detail } },
    });
    json!({
        "description": "Why the call was not done; `code` is gRPC's, `reason` a page of ERRORS.md.",
        "content": { "application/json": { "schema": error } },
    })
}

/// Messages and enumerations by their full names.
#[derive(Default)]
struct Schemas {
    done: BTreeMap<String, Value>,
}

impl Schemas {
    fn message(&mut self, message: &MessageDescriptor) -> Value {
        let name = message.full_name();
        // Those that JSON writes in ways of their own.
        match name {
            "google.protobuf.Timestamp" => {
                return json!({ "type": "string", "format": "date-time" });
            }
            "google.protobuf.Duration" => return json!({ "type": "string", "format": "duration" }),
            "google.protobuf.Struct" => return json!({ "type": "object" }),
            "google.protobuf.Value" => return json!({}),
            _ => {}
        }
        if !self.done.contains_key(name) {
            // One that holds itself finds itself done.
            self.done.insert(name.to_owned(), Value::Null);
            let fields = message.fields().map(|field| {
                let mut schema = self.field(&field);
                let about = comment(&message.parent_file(), field.path());
                if !about.is_empty() {
                    schema["description"] = about.into();
                }
                (field.json_name().to_owned(), schema)
            });
            let properties: Map<String, Value> = fields.collect();
            let about = comment(&message.parent_file(), message.path());
            let schema =
                json!({ "type": "object", "description": about, "properties": properties });
            self.done.insert(name.to_owned(), schema);
        }
        reference(name)
    }

    fn field(&mut self, field: &FieldDescriptor) -> Value {
        if let (true, Kind::Message(entry)) = (field.is_map(), field.kind()) {
            let value = self.kind(&entry.map_entry_value_field().kind());
            return json!({ "type": "object", "additionalProperties": value });
        }
        let one = self.kind(&field.kind());
        if field.is_list() { json!({ "type": "array", "items": one }) } else { one }
    }

    /// protobuf.dev/programming-guides/json
    fn kind(&mut self, kind: &Kind) -> Value {
        match kind {
            Kind::Bool => json!({ "type": "boolean" }),
            Kind::String => json!({ "type": "string" }),
            Kind::Bytes => json!({ "type": "string", "contentEncoding": "base64" }),
            Kind::Int32 | Kind::Sint32 | Kind::Sfixed32 => {
                json!({ "type": "integer", "format": "int32" })
            }
            Kind::Uint32 | Kind::Fixed32 => json!({ "type": "integer", "minimum": 0 }),
            Kind::Int64 | Kind::Sint64 | Kind::Sfixed64 => {
                json!({ "type": "string", "format": "int64" })
            }
            Kind::Uint64 | Kind::Fixed64 => json!({ "type": "string", "format": "uint64" }),
            Kind::Float | Kind::Double => {
                json!({ "anyOf": [{ "type": "number" }, { "enum": ["NaN", "Infinity", "-Infinity"] }] })
            }
            Kind::Enum(all) => self.names(all),
            Kind::Message(message) => self.message(message),
        }
    }

    fn names(&mut self, all: &EnumDescriptor) -> Value {
        let names: Vec<String> = all.values().map(|value| value.name().to_owned()).collect();
        let about = comment(&all.parent_file(), all.path());
        let schema = json!({ "type": "string", "description": about, "enum": names });
        self.done.insert(all.full_name().to_owned(), schema);
        reference(all.full_name())
    }
}

fn reference(name: &str) -> Value {
    json!({ "$ref": format!("#/components/schemas/{name}") })
}

/// What a `.proto` file says above something, in one line.
fn comment(file: &FileDescriptor, path: &[i32]) -> String {
    let all = file.file_descriptor_proto().source_code_info.as_ref();
    let said = all.and_then(|all| all.location.iter().find(|place| place.path == path));
    let words = said.map_or("", |place| place.leading_comments());
    words.split_whitespace().collect::<Vec<_>>().join(" ")
}
