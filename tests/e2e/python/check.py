#!/usr/bin/env python3
"""Checks of a fleet with independent Python packages, used by the tests.

    ./check.py services 127.0.0.1:7070    list the services with gRPC reflection
    ./check.py closed DIR    the same for a closed fleet
    ./check.py openapi 127.0.0.1:7070    validate the OpenAPI document; print its version and size
    ./check.py tensors adapter.safetensors    print name, type and shape of each tensor
"""
import json
import sys
import urllib.request

import flotilla
import grpc
import openapi_spec_validator
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)
from google.protobuf.descriptor_pool import DescriptorPool
from safetensors.numpy import load_file


def services(server):
    describe(grpc.insecure_channel(server))


def closed(credentials):
    describe(flotilla.connect(credentials).channel)


def describe(channel):
    with channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        pool = DescriptorPool(database)
        for name in database.get_services():
            methods = pool.FindServiceByName(name).methods
            print(name, *(method.name for method in methods))


def openapi(server):
    with urllib.request.urlopen(f"http://{server}/openapi.json") as answer:
        document = json.load(answer)
    openapi_spec_validator.validate(document)
    print(document["openapi"], len(document["paths"]))


def tensors(file):
    for name, tensor in sorted(load_file(file).items()):
        print(name, tensor.dtype, "x".join(map(str, tensor.shape)))


commands = {"services": services, "closed": closed, "openapi": openapi, "tensors": tensors}
commands[sys.argv[1]](sys.argv[2])
