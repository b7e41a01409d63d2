{{/* Checks of engine vllm, and of values that belong to the other engine. Included by _validate.tpl. */}}

{{- define "kvferry.validateEngine" -}}
{{- if eq .Values.engine "vllm" -}}
{{- include "kvferry.validateVllm" . -}}
{{- else -}}
{{- if .Values.vllm.settings -}}
{{- fail "vllm.settings: they are of the plug-in for vLLM; set engine to vllm, or remove them" -}}
{{- end -}}
{{- range $role := list "prefill" "decode" "aggregated" -}}
{{- if (index $.Values $role).vllm -}}
{{- fail (printf "%s.vllm: it is for vLLM engines; set engine to vllm, or remove it" $role) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "kvferry.validateVllm" -}}
{{- $vllm := .Values.vllm -}}
{{- range $role := include "kvferry.kvWorkers" . | fromJsonArray -}}
{{- $config := include "kvferry.config" (dict "root" $ "role" $role) | fromYaml -}}
{{- if ne (dig "model" "quantization" "none" $config) "none" -}}
{{- fail (printf "%s.config.model.quantization: it is for our own engine; remove it, and give vLLM its --quantization in vllm.arguments" $role) -}}
{{- end -}}
{{- end -}}
{{- if ne .Values.router.enabled $vllm.agent.enabled -}}
{{- fail "vllm.agent.enabled and router.enabled: our router reaches vLLM engines by agents; set both, or neither where llm-d routes" -}}
{{- end -}}
{{- if and (not $vllm.agent.enabled) .Values.decode.enabled (not $vllm.proxy.image.tag) (not $vllm.proxy.image.digest) -}}
{{- fail "vllm.proxy.image.tag: give the version or the digest of llm-d's routing side-car, which decode pods need without our agent" -}}
{{- end -}}
{{- range $way := list "ingress" "httpRoute" "inferencePool" -}}
{{- if and (not $vllm.agent.enabled) (index $.Values $way).enabled -}}
{{- fail (printf "%s.enabled: without our router there is nothing to lead to; llm-d's gateway is the way in" $way) -}}
{{- end -}}
{{- end -}}
{{- if and (not $vllm.agent.enabled) (or .Values.monitoring.podMonitor.enabled .Values.monitoring.serviceMonitor.enabled .Values.monitoring.prometheusRule.enabled) -}}
{{- fail "monitoring: without our agent and router there are only vLLM's own metrics, at the pods' port http; turn it off" -}}
{{- end -}}
{{- range $name, $image := dict "vllm.image" $vllm.image "vllm.proxy.image" $vllm.proxy.image "vllm.plugin" $vllm.plugin -}}
{{- if eq $image.tag "latest" -}}
{{- fail (printf "%s.tag: \"latest\" names another image every day; give a version or a digest" $name) -}}
{{- end -}}
{{- end -}}
{{- $ours := list "host" "port" "transports" "insecure" "kv_verify" "transfer_deadline_s" "transfer_stall_s" "transport_retry_s" "transport_retry_max_s" "handshake_timeout_s" "lease_s" "lease_renew_interval_s" "lease_max_s" "max_quarantined_blocks" -}}
{{- range $name, $_ := $vllm.settings -}}
{{- if has $name $ours -}}
{{- fail (printf "vllm.settings.%s: the chart sets it, from config.connector, ports.control or security.insecure; set it there" $name) -}}
{{- end -}}
{{- if not (has $name (list "cluster_key_file" "kv_cache_layout" "model" "peers")) -}}
{{- fail (printf "vllm.settings.%s: the plug-in has no such setting; there are cluster_key_file, kv_cache_layout, model and peers" $name) -}}
{{- end -}}
{{- end -}}
{{- if .Values.encode.enabled -}}
{{- fail "encode.enabled: vLLM engines compute embeddings of images themselves; turn it off" -}}
{{- end -}}
{{- if .Values.kvstore.enabled -}}
{{- fail "kvstore.enabled: vLLM engines do not use our store; turn it off" -}}
{{- end -}}
{{- if ne .Values.lmcache.mode "none" -}}
{{- fail "lmcache.mode: vLLM has a connector of its own for LMCache, which this chart does not set; leave it at none" -}}
{{- end -}}
{{- range $role := include "kvferry.kvWorkers" . | fromJsonArray -}}
{{- include "kvferry.validateVllmRole" (dict "root" $ "role" $role) -}}
{{- end -}}
{{- end -}}

{{- define "kvferry.validateVllmRole" -}}
{{- if dig "worker" "can_switch_role" false (include "kvferry.config" . | fromYaml) -}}
{{- fail (printf "%s.config.worker.can_switch_role: the role of a vLLM engine is part of its start; turn it off" .role) -}}
{{- end -}}
{{- $values := index .root.Values .role -}}
{{- $own := default dict $values.vllm -}}
{{- $connector := (include "kvferry.config" . | fromYaml).connector -}}
{{- if $connector.peer_prefixes -}}
{{- fail (printf "%s.config.connector.peer_prefixes: vLLM engines do not share their prefix caches; turn it off" .role) -}}
{{- end -}}
{{- if ne (default "p2p" $connector.name) "p2p" -}}
{{- fail (printf "%s.config.connector.name = %s: vLLM engines hand KV over by p2p, the plug-in's; leave it at p2p" .role $connector.name) -}}
{{- end -}}
{{- $gpus := mul (dig "gpu" "count" 0 $values | int) (include "kvferry.nodes" . | int) | int -}}
{{- $ranks := dig "tensorParallelSize" 1 $own | int -}}
{{- $size := mul $ranks (dig "dataParallelSize" 1 $own | int) | int -}}
{{- $named := ternary (printf "%s.vllm.tensorParallelSize times dataParallelSize" .role) (printf "%s.vllm.tensorParallelSize" .role) (hasKey $own "dataParallelSize") -}}
{{- $image := .root.Values.vllm.image -}}
{{- if and (gt (include "kvferry.nodes" . | int) 1) (gt (dig "dataParallelSize" 1 $own | int) 1) -}}
{{- fail (printf "%s.vllm.dataParallelSize: an engine of several nodes is one; set %s.replicas for more of them" .role .role) -}}
{{- end -}}
{{- $arguments := concat (default list .root.Values.vllm.arguments) (default list $own.arguments) -}}
{{- $isParallel := regexMatch "--pipeline[-_]parallel[-_]size" (join " " $arguments) -}}
{{- if and (not $gpus) (gt $size 1) (not (contains "cpu" (printf "%s:%s" $image.repository $image.tag))) -}}
{{- fail (printf "%s = %d, but its pods have no GPU: set %s.gpu.count, or name vLLM's image for CPUs" $named $size .role) -}}
{{- end -}}
{{- if and $gpus (gt $size $gpus) -}}
{{- fail (printf "%s = %d, but its pods have %d GPUs (%s.gpu.count times %s.vllm.nodes): lower the first or raise one of the others" $named $size $gpus .role .role) -}}
{{- end -}}
{{- if and (gt $gpus $size) (not $isParallel) -}}
{{- fail (printf "%s.gpu.count: the engine has %d GPUs, but %s = %d uses fewer, the others would idle; make them equal" .role $gpus $named $size) -}}
{{- end -}}
{{- if and (gt (include "kvferry.nodes" . | int) 1) (ne (dig "autoscaling" "type" "none" $values) "none") -}}
{{- fail (printf "%s.autoscaling: it scales Deployments, and an engine of several nodes is a LeaderWorkerSet; remove it" .role) -}}
{{- end -}}
{{- if and (gt (include "kvferry.nodes" . | int) 1) (ne $values.kind "Deployment") -}}
{{- fail (printf "%s.kind = %s: an engine of several nodes is a LeaderWorkerSet, which has a Service of its own; leave it at Deployment" .role $values.kind) -}}
{{- end -}}
{{- if and (or (gt $size 1) $isParallel) (lt (include "kvferry.bytes" .root.Values.shm.size | int64) 1073741824) -}}
{{- fail (printf "shm.size = %s: the ranks of %s's engine exchange messages in /dev/shm; give at least 1Gi" .root.Values.shm.size .role) -}}
{{- end -}}
{{- $model := (include "kvferry.config" . | fromYaml).model.name -}}
{{- if not (contains "/" $model) -}}
{{- fail (printf "%s.config.model.name = %q: vLLM knows none of our aliases; give a Hugging Face id with its owner, such as Qwen/Qwen3-8B or openai-community/gpt2, or a folder" .role $model) -}}
{{- end -}}
{{- $chosen := list "--host" "--port" "--api-key" "--served-model-name" "--kv-transfer-config" "--tensor-parallel-size" "-tp" "--data-parallel-size" "-dp" "--nnodes" "--node-rank" "--master-addr" "--headless" -}}
{{- $tp := " and set vllm.tensorParallelSize of the role" -}}
{{- $dp := " and set vllm.dataParallelSize of the role" -}}
{{- range $argument := $arguments -}}
{{- $flag := first (splitList "=" (first (splitList " " (toString $argument)))) | replace "_" "-" -}}
{{- if has $flag $chosen -}}
{{- fail (printf "vllm.arguments or %s.vllm.arguments: %s is the chart's business; remove it%s" $.role $flag (get (dict "--tensor-parallel-size" $tp "-tp" $tp "--data-parallel-size" $dp "-dp" $dp) $flag)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
