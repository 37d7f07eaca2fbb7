#!/usr/bin/env python3
"""What a Python program sees of a fleet beside its API: used by the tests.

    ./check.py services 127.0.0.1:7070    the services that reflection lists
    ./check.py closed KIT    the same, of a closed fleet
    ./check.py tensors adapter.safetensors    name, type and shape of each tensor
"""
import sys

import client
import grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)
from google.protobuf.descriptor_pool import DescriptorPool
from safetensors.numpy import load_file


def services(server):
    describe(grpc.insecure_channel(server))


def closed(kit):
    describe(client.connect(None, kit))


def describe(channel):
    with channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        pool = DescriptorPool(database)
        for name in database.get_services():
            methods = pool.FindServiceByName(name).methods
            print(name, *(method.name for method in methods))


def tensors(file):
    for name, tensor in sorted(load_file(file).items()):
        print(name, tensor.dtype, "x".join(map(str, tensor.shape)))


{"services": services, "closed": closed, "tensors": tensors}[sys.argv[1]](sys.argv[2])
