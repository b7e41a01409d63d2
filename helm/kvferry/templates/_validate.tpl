{{/* What a JSON schema cannot say: values that do not go together. Every message says what to change. */}}
{{- define "kvferry.validate" -}}
{{- $workers := include "kvferry.kvWorkers" . | fromJsonArray -}}
{{- include "kvferry.validateEngine" . -}}
{{- if not (or .Values.router.enabled (eq .Values.engine "vllm")) -}}
{{- fail "router.enabled: workers need a router to register with; leave it on" -}}
{{- end -}}
{{- if ne .Values.prefill.enabled .Values.decode.enabled -}}
{{- fail "prefill.enabled and decode.enabled: a prompt needs one worker of each; set both, or use aggregated.enabled" -}}
{{- end -}}
{{- $name := include "kvferry.fullname" . -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $name) -}}
{{- fail (printf "names of this release would begin with %q, but a Service begins with a letter and has lower-case letters, digits and - only: set fullnameOverride" $name) -}}
{{- end -}}
{{- if not $workers -}}
{{- fail "no worker is enabled: set prefill.enabled and decode.enabled, or aggregated.enabled" -}}
{{- end -}}
{{- if eq .Values.image.tag "latest" -}}
{{- fail "image.tag: \"latest\" names another image every day; give a version or a digest" -}}
{{- end -}}
{{- include "kvferry.validateSecurity" . -}}
{{- include "kvferry.validatePorts" . -}}
{{- include "kvferry.validatePodPorts" . -}}
{{- include "kvferry.validateStores" . -}}
{{- if .Values.encode.enabled -}}
{{- include "kvferry.validateEncode" . -}}
{{- end -}}
{{- include "kvferry.validateModelCache" . -}}
{{- range $role := include "kvferry.roles" . | fromJsonArray -}}
{{- include "kvferry.validateRole" (dict "root" $ "role" $role) -}}
{{- end -}}
{{- include "kvferry.validateAgreement" . -}}
{{- if and .Values.rdma.enabled (not .Values.prefill.enabled) (not (include "kvferry.usesRdma" (dict "root" . "role" "aggregated"))) -}}
{{- fail "rdma.enabled: no worker would use RDMA. Aggregated ones do if they read from each other (connector.peer_prefixes, worker.can_switch_role) by transport nixl; turn it off, or enable prefill and decode" -}}
{{- end -}}
{{- if and .Values.inferencePool.enabled (not .Values.inferencePool.endpointPicker.name) -}}
{{- fail "inferencePool.endpointPicker.name: name the Service of the endpoint picker that chooses a router" -}}
{{- end -}}
{{- if and .Values.ingress.enabled (not .Values.ingress.hosts) -}}
{{- fail "ingress.hosts: name at least one host" -}}
{{- end -}}
{{- if and .Values.httpRoute.enabled (not .Values.httpRoute.parentRefs) -}}
{{- fail "httpRoute.parentRefs: name the Gateway that the route belongs to" -}}
{{- end -}}
{{- if and .Values.httpRoute.enabled .Values.httpRoute.toInferencePool (not .Values.inferencePool.enabled) -}}
{{- fail "httpRoute.toInferencePool: there is no pool; set inferencePool.enabled, or toInferencePool to false for the service" -}}
{{- end -}}
{{- include "kvferry.validateKeySource" . -}}
{{- end -}}

{{- define "kvferry.validateSecurity" -}}
{{- $key := .Values.security.clusterKey -}}
{{- if and .Values.security.insecure (or $key.existingSecret $key.value) -}}
{{- fail "security.insecure: it stands for no cluster key, but security.clusterKey names one; remove one of the two" -}}
{{- end -}}
{{- if and $key.existingSecret $key.value -}}
{{- fail "security.clusterKey: existingSecret and value are two keys; give one" -}}
{{- end -}}
{{- if and $key.generate (or $key.existingSecret $key.value) -}}
{{- fail "security.clusterKey.generate: a key is given already; remove generate, or existingSecret and value" -}}
{{- end -}}
{{- if and $key.others (not $key.value) -}}
{{- fail (printf "security.clusterKey.others: they go with security.clusterKey.value; of an existingSecret they are its key %s" $key.othersKey) -}}
{{- end -}}
{{- end -}}

{{/* Last, so that every other mistake is reported first. */}}
{{- define "kvferry.validateKeySource" -}}
{{- $key := .Values.security.clusterKey -}}
{{- if not (or .Values.security.insecure $key.existingSecret $key.value $key.generate) -}}
{{- fail (printf "security.clusterKey: no key is given. Make one: kubectl -n %s create secret generic kvferry-cluster --from-literal=%s=$(openssl rand -hex 32), and set security.clusterKey.existingSecret=kvferry-cluster. With helm install and upgrade security.clusterKey.generate=true makes one too; where templates are rendered without a cluster (helm template, Argo CD) it would be another one each time" .Release.Namespace $key.key) -}}
{{- end -}}
{{- end -}}

{{- define "kvferry.validatePorts" -}}
{{- $seen := dict -}}
{{- range $name, $port := omit .Values.ports "ucx" -}}
{{- if hasKey $seen (toString $port) -}}
{{- fail (printf "ports.%s and ports.%s are both %v; every port needs its own number" (get $seen (toString $port)) $name $port) -}}
{{- end -}}
{{- $_ := set $seen (toString $port) $name -}}
{{- end -}}
{{- $ucx := .Values.ports.ucx -}}
{{- if gt (int $ucx.first) (int $ucx.last) -}}
{{- fail (printf "ports.ucx.first = %v must be at most ports.ucx.last = %v" $ucx.first $ucx.last) -}}
{{- end -}}
{{- range $port, $name := $seen -}}
{{- if and (ge (int $port) (int $ucx.first)) (le (int $port) (int $ucx.last)) -}}
{{- fail (printf "ports.%s = %s lies in ports.ucx; move one of them" $name $port) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Ports of containers beside a worker: all containers of a pod have one network. */}}
{{- define "kvferry.validatePodPorts" -}}
{{- $ucx := .Values.ports.ucx -}}
{{- range $role := include "kvferry.workers" . | fromJsonArray -}}
{{- $at := dict "root" $ "role" $role -}}
{{- $used := list "control" "data" "ops" -}}
{{- if include "kvferry.hasStore" $at -}}{{- $used = concat $used (list "store" "storeOps") -}}{{- end -}}
{{- if and (include "kvferry.isVllm" $at) (not $.Values.vllm.agent.enabled) -}}{{- $used = append $used "http" -}}{{- end -}}
{{- $seen := dict -}}
{{- range $name := $used -}}
{{- $_ := set $seen (get $.Values.ports $name | toString) (printf "ports.%s" $name) -}}
{{- end -}}
{{- $beside := dict -}}
{{- if or (include "kvferry.hasAgent" $at) (include "kvferry.hasProxy" $at) -}}
{{- $_ := set $beside "vllm.port" $.Values.vllm.port -}}
{{- end -}}
{{- if eq $.Values.lmcache.mode "sidecar" -}}
{{- $beside = merge $beside (dict "lmcache.port" $.Values.lmcache.port "lmcache.httpPort" $.Values.lmcache.httpPort) -}}
{{- end -}}
{{- range $name, $port := $beside -}}
{{- with get $seen (toString $port) -}}
{{- fail (printf "%s and %s are both %v in the pods of %s workers; every port needs its own number" $name . $port $role) -}}
{{- end -}}
{{- if and (ge (int $port) (int $ucx.first)) (le (int $port) (int $ucx.last)) -}}
{{- fail (printf "%s = %v lies in ports.ucx; move one of them" $name $port) -}}
{{- end -}}
{{- $_ := set $seen (toString $port) $name -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "kvferry.validateStores" -}}
{{- $lmcache := .Values.lmcache -}}
{{- if and (eq $lmcache.mode "external") (not $lmcache.host) -}}
{{- fail "lmcache.host: say where the external LMCache server listens" -}}
{{- end -}}
{{- if and (eq $lmcache.mode "sidecar") (not $lmcache.image.repository) -}}
{{- fail "lmcache.image.repository: name the image of the LMCache server that runs in every worker's pod" -}}
{{- end -}}
{{- if and (eq $lmcache.mode "sidecar") (not $lmcache.image.digest) (has $lmcache.image.tag (list "" "latest")) -}}
{{- fail "lmcache.image.tag: give a version or a digest" -}}
{{- end -}}
{{- if and .Values.kvstore.redis.enabled (not .Values.kvstore.enabled) -}}
{{- fail "kvstore.redis: Redis is a tier of the store; set kvstore.enabled too" -}}
{{- end -}}
{{- if .Values.kvstore.enabled -}}
{{- include "kvferry.validateStore" . -}}
{{- end -}}
{{- if and .Values.kvstore.redis.enabled (not .Values.kvstore.redis.host) -}}
{{- fail "kvstore.redis.host: say where Redis listens" -}}
{{- end -}}
{{- end -}}

{{- define "kvferry.validateStore" -}}
{{- $config := include "kvferry.config" (dict "root" . "role" "kvstore") | fromYaml -}}
{{- $arena := dig "kvstore" "memory_bytes" 1073741824 $config | int64 -}}
{{- $limit := dig "resources" "limits" "memory" "" .Values.kvstore -}}
{{- if eq (dig "kvstore" "huge_pages" "never" $config) "always" -}}
{{- include "kvferry.validateHugePages" (dict "role" "kvstore" "values" .Values.kvstore "section" "config.kvstore" "wish" "always" "bytes" $arena) -}}
{{- $arena = 0 | int64 -}}
{{- end -}}
{{- if and $limit (lt (include "kvferry.bytes" $limit | int64) $arena) -}}
{{- fail (printf "kvstore.resources.limits.memory = %s does not hold the arena (config.kvstore.memory_bytes = %d)" $limit $arena) -}}
{{- end -}}
{{- if ne (int .Values.kvstore.replicas) 1 -}}
{{- fail (printf "kvstore.replicas = %v: one store serves all workers, and several would be separate caches that clients reach by chance; leave it at 1 and raise its memory, or set kvstore.mode to sidecar" .Values.kvstore.replicas) -}}
{{- end -}}
{{- if .Values.kvstore.autoscaling -}}
{{- fail "kvstore.autoscaling: a store is not scaled, its blocks are in one process; remove it and raise its memory" -}}
{{- end -}}
{{- if and (eq .Values.kvstore.kind "Deployment") .Values.kvstore.disk.size (eq .Values.kvstore.mode "service") -}}
{{- fail "kvstore.kind = Deployment: only a StatefulSet has a disk of its own; use kvstore.kind = StatefulSet, or leave kvstore.disk.size empty" -}}
{{- end -}}
{{- end -}}

{{- define "kvferry.validateRole" -}}
{{- $values := index .root.Values .role -}}
{{- $config := include "kvferry.config" . | fromYaml -}}
{{- $scaling := dig "autoscaling" "type" "none" $values -}}
{{- if and (ne $scaling "none") (gt (int $values.autoscaling.min) (int $values.autoscaling.max)) -}}
{{- fail (printf "%s.autoscaling.min = %v must be at most max = %v" .role $values.autoscaling.min $values.autoscaling.max) -}}
{{- end -}}
{{- $grace := include "kvferry.graceSeconds" . | int -}}
{{- $drain := include "kvferry.drainSeconds" . | int -}}
{{- $parts := "the drain time and connector.lease_s" -}}
{{- if and (include "kvferry.isVllm" .) (not (include "kvferry.hasAgent" .)) -}}
{{- $parts = "the drain time, connector.lease_s, vllm.endpointDelaySeconds and vllm.idleSeconds" -}}
{{- end -}}
{{- if lt $grace (add $drain 5 | int) -}}
{{- fail (printf "%s.terminationGracePeriodSeconds = %d: draining takes up to %d s, so the pod would be killed in the middle of it; give at least %d, or shorten %s" .role $grace $drain (add $drain 5) $parts) -}}
{{- end -}}
{{- $checked := dict "role" .role "values" $values "config" $config "root" .root -}}
{{- include "kvferry.validateWorkload" $checked -}}
{{- include "kvferry.validateSettings" $checked -}}
{{- if and (has .role (list "encode" "prefill" "decode" "aggregated")) (not (include "kvferry.isVllm" .)) -}}
{{- include "kvferry.validateDevices" $checked -}}
{{- end -}}
{{- if and (has .role (list "prefill" "decode" "aggregated")) (not (include "kvferry.isVllm" .)) -}}
{{- include "kvferry.validateMemory" $checked -}}
{{- end -}}
{{- if and (include "kvferry.usesRdma" .) (not (include "kvferry.usesNixl" .)) -}}
{{- fail (printf "rdma.enabled: only transport nixl uses RDMA; put it in front of %s.config.connector.transports" .role) -}}
{{- end -}}
{{- $names := include "kvferry.connectorNames" $config.connector | fromJsonArray -}}
{{- $isBesideOthers := and (eq .role "aggregated") (gt (len $names) 1) -}}
{{- $needsTransport := and (has "p2p" $names) (or $isBesideOthers (include "kvferry.movesBlocks" .)) -}}
{{- if and $needsTransport (kindIs "slice" $config.connector.transports) (not $config.connector.transports) -}}
{{- fail (printf "%s.config.connector.transports is empty: name nixl or tcp" .role) -}}
{{- end -}}
{{- if and (has "shm" $config.connector.transports) (include "kvferry.movesBlocks" .) -}}
{{- fail (printf "%s.config.connector.transports: shm works between processes of one pod only, and every worker has a pod of its own; use nixl or tcp" .role) -}}
{{- end -}}
{{- end -}}

{{- define "kvferry.validateEncode" -}}
{{- $connector := (include "kvferry.config" (dict "root" . "role" "encode") | fromYaml).ec_connector -}}
{{- if eq $connector.name "none" -}}
{{- fail "config.ec_connector.name = none: no worker could read what encode workers compute; leave it out, or say p2p or shared" -}}
{{- end -}}
{{- if and (eq $connector.name "shared") (or (not .Values.kvstore.enabled) (ne .Values.kvstore.mode "service")) -}}
{{- fail "config.ec_connector.name = shared: it needs a store that all workers reach; set kvstore.enabled, with kvstore.mode service" -}}
{{- end -}}
{{- range $role := include "kvferry.workers" . | fromJsonArray -}}
{{- $own := (include "kvferry.config" (dict "root" $ "role" $role) | fromYaml).ec_connector -}}
{{- $transports := ternary $own.transports list (eq $own.name "p2p") -}}
{{- if has "shm" $transports -}}
{{- fail (printf "%s.config.ec_connector.transports: shm works between processes of one pod only, and every worker has a pod of its own; use tcp" $role) -}}
{{- end -}}
{{- if has "nixl" $transports -}}
{{- fail (printf "%s.config.ec_connector.transports: nixl would not connect, since encode pods open no ports for UCX and get no RDMA device; use tcp" $role) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The huge pages of a container: in Kubernetes it has those of its limit, and none beyond. */}}
{{- define "kvferry.validateHugePages" -}}
{{- $given := "" -}}
{{- range $name, $amount := dig "resources" "limits" dict .values -}}
{{- if hasPrefix "hugepages-" $name -}}{{- $given = $amount -}}{{- end -}}
{{- end -}}
{{- if not $given -}}
{{- fail (printf "%s: %s.huge_pages = %s, but %s.resources.limits names no hugepages-2Mi (or -1Gi): a container gets none without" .role .section .wish .role) -}}
{{- end -}}
{{- if lt (include "kvferry.bytes" $given | int64) (int64 .bytes) -}}
{{- fail (printf "%s.resources.limits: %s of huge pages do not hold the %d bytes of %s.memory_bytes" .role $given (int64 .bytes) .section) -}}
{{- end -}}
{{- end -}}

{{- define "kvferry.validateMemory" -}}
{{- $limit := dig "resources" "limits" "memory" "" .values -}}
{{- $pool := dig "cache" "memory_bytes" 1073741824 .config | int64 -}}
{{- $others := include "kvferry.connectorBytes" . | int64 -}}
{{- if or (gt (dig "gpu" "count" 0 .values | int) 0) .values.resourceClaims -}}
{{- $pool = 0 | int64 -}}
{{- else if eq (dig "cache" "huge_pages" "never" .config) "always" -}}
{{- include "kvferry.validateHugePages" (dict "role" .role "values" .values "section" "config.cache" "wish" "always" "bytes" $pool) -}}
{{- $pool = 0 | int64 -}}
{{- end -}}
{{- if $limit -}}
{{- $shm := include "kvferry.bytes" .root.Values.shm.size | int64 -}}
{{- $bytes := include "kvferry.bytes" $limit | int64 -}}
{{- if lt $bytes (add $pool $shm $others | int64) -}}
{{- if $others -}}
{{- fail (printf "%s.resources.limits.memory = %s does not hold the KV pool (%d), the connector's blocks in host memory (config.connector.offload.memory_bytes or config.kvstore.memory_bytes: %d) and /dev/shm (%s); the model comes on top" .role $limit $pool $others .root.Values.shm.size) -}}
{{- end -}}
{{- fail (printf "%s.resources.limits.memory = %s does not even hold the KV pool (config.cache.memory_bytes = %d) and /dev/shm (shm.size = %s); the model comes on top" .role $limit $pool .root.Values.shm.size) -}}
{{- end -}}
{{- end -}}
{{- end -}}


{{/* Host memory that connectors take within a worker: the arena of "offload", and of "store" where no store has an address. */}}
{{- define "kvferry.connectorBytes" -}}
{{- $connector := .config.connector -}}
{{- $names := include "kvferry.connectorNames" $connector | fromJsonArray -}}
{{- $bytes := 0 | int64 -}}
{{- if and (has "offload" $names) (ne (dig "offload" "huge_pages" "never" $connector) "always") -}}
{{- $bytes = add $bytes (dig "offload" "memory_bytes" 1073741824 $connector | int64) -}}
{{- end -}}
{{- if and (has "store" $names) (not .root.Values.kvstore.enabled) (ne (dig "kvstore" "huge_pages" "never" .config) "always") -}}
{{- $bytes = add $bytes (dig "kvstore" "memory_bytes" 1073741824 .config | int64) -}}
{{- end -}}
{{- $bytes -}}
{{- end -}}
