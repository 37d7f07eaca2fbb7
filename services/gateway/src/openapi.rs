//! The JSON services as OpenAPI 3.1 (spec.openapis.org), for tools that generate clients and forms.
//! Built from the descriptors that also parse the calls, with the comments of the `.proto` files.

use std::collections::BTreeMap;

use axum::{Router, http::header, routing::get};
use bytes::Bytes;
use prost_reflect::{
    DescriptorPool, EnumDescriptor, FieldDescriptor, FileDescriptor, Kind, MessageDescriptor,
    MethodDescriptor, ServiceDescriptor,
};
use serde_json::{Map, Value, json};

pub(crate) const DOCUMENT_PATH: &str = "/openapi.json";

const API_PACKAGE: &str = "flotilla.v1";

pub(crate) fn build_routes(services: &DescriptorPool) -> Router {
    let document = Bytes::from(build_document(services).to_string());
    let answer = move || async { ([(header::CONTENT_TYPE, "application/json")], document) };
    Router::new().route(DOCUMENT_PATH, get(answer))
}

fn build_document(services: &DescriptorPool) -> Value {
    let ours = || services.services().filter(|service| service.package_name() == API_PACKAGE);
    let mut schemas = SchemaSet::default();
    let mut paths = Map::new();
    for service in ours() {
        for method in service.methods() {
            let path = format!("/{}/{}", service.full_name(), method.name());
            paths.insert(path, json!({ "post": build_operation(&service, &method, &mut schemas) }));
        }
    }
    let tags = ours().map(|service| {
        let about = leading_comment(&service.parent_file(), service.path());
        json!({ "name": service.name(), "description": about })
    });
    json!({
        "openapi": "3.1.1",
        "info": {
            "title": "Flotilla",
            "version": API_PACKAGE,
            "description": "The control API of a fleet as JSON. A closed fleet requires a bearer.",
        },
        "security": [{}, { "bearer": [] }],
        "tags": tags.collect::<Vec<_>>(),
        "paths": paths,
        "components": {
            "securitySchemes": { "bearer": { "type": "http", "scheme": "bearer" } },
            "responses": { "failed": error_response() },
            "schemas": schemas.by_name,
        },
    })
}

fn build_operation(
    service: &ServiceDescriptor,
    method: &MethodDescriptor,
    schemas: &mut SchemaSet,
) -> Value {
    let kind = match method.is_server_streaming() {
        true => "application/x-ndjson",
        false => "application/json",
    };
    let what = match method.is_server_streaming() {
        true => "One JSON object per line, streamed.",
        false => "The answer.",
    };
    json!({
        "operationId": format!("{}_{}", service.name(), method.name()),
        "tags": [service.name()],
        "description": leading_comment(&service.parent_file(), method.path()),
        "requestBody": {
            "required": true,
            "content": { "application/json": { "schema": schemas.message_schema(&method.input()) } },
        },
        "responses": {
            "200": {
                "description": what,
                "content": { kind: { "schema": schemas.message_schema(&method.output()) } },
            },
            "default": { "$ref": "#/components/responses/failed" },
        },
    })
}

/// Returns the schema of an error, as `json::error_codes` writes it.
fn error_response() -> Value {
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
        "description": "Why the call failed; `code` is the gRPC code, `reason` an entry of ERRORS.md.",
        "content": { "application/json": { "schema": error } },
    })
}

/// The schemas of messages and enumerations by full name.
#[derive(Default)]
struct SchemaSet {
    by_name: BTreeMap<String, Value>,
}

impl SchemaSet {
    fn message_schema(&mut self, message: &MessageDescriptor) -> Value {
        let name = message.full_name();
        // Well-known types with their own JSON format.
        match name {
            "google.protobuf.Timestamp" => {
                return json!({ "type": "string", "format": "date-time" });
            }
            "google.protobuf.Duration" => return json!({ "type": "string", "format": "duration" }),
            "google.protobuf.Struct" => return json!({ "type": "object" }),
            "google.protobuf.Value" => return json!({}),
            _ => {}
        }
        if !self.by_name.contains_key(name) {
            // Inserted first, so that a recursive message terminates.
            self.by_name.insert(name.to_owned(), Value::Null);
            let fields = message.fields().map(|field| {
                let mut schema = self.field_schema(&field);
                let about = leading_comment(&message.parent_file(), field.path());
                if !about.is_empty() {
                    schema["description"] = about.into();
                }
                (field.json_name().to_owned(), schema)
            });
            let properties: Map<String, Value> = fields.collect();
            let about = leading_comment(&message.parent_file(), message.path());
            let schema =
                json!({ "type": "object", "description": about, "properties": properties });
            self.by_name.insert(name.to_owned(), schema);
        }
        schema_reference(name)
    }

    fn field_schema(&mut self, field: &FieldDescriptor) -> Value {
        if let (true, Kind::Message(entry)) = (field.is_map(), field.kind()) {
            let value = self.kind_schema(&entry.map_entry_value_field().kind());
            return json!({ "type": "object", "additionalProperties": value });
        }
        let one = self.kind_schema(&field.kind());
        if field.is_list() { json!({ "type": "array", "items": one }) } else { one }
    }

    /// Follows protobuf.dev/programming-guides/json.
    fn kind_schema(&mut self, kind: &Kind) -> Value {
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
            Kind::Enum(all) => self.enum_schema(all),
            Kind::Message(message) => self.message_schema(message),
        }
    }

    fn enum_schema(&mut self, all: &EnumDescriptor) -> Value {
        let names: Vec<String> = all.values().map(|value| value.name().to_owned()).collect();
        let about = leading_comment(&all.parent_file(), all.path());
        let schema = json!({ "type": "string", "description": about, "enum": names });
        self.by_name.insert(all.full_name().to_owned(), schema);
        schema_reference(all.full_name())
    }
}

fn schema_reference(name: &str) -> Value {
    json!({ "$ref": format!("#/components/schemas/{name}") })
}

/// Returns the comment of an item in one line.
fn leading_comment(file: &FileDescriptor, path: &[i32]) -> String {
    let all = file.file_descriptor_proto().source_code_info.as_ref();
    let location = all.and_then(|all| all.location.iter().find(|place| place.path == path));
    let words = location.map_or("", |place| place.leading_comments());
    words.split_whitespace().collect::<Vec<_>>().join(" ")
}
