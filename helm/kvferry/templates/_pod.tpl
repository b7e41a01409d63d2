{{/* The pod of a role: (dict "root" $ "role" "prefill"). */}}

{{- define "kvferry.podTemplate" -}}
{{- $values := index .root.Values .role -}}
metadata:
  labels:
    {{- include "kvferry.selector" . | nindent 4 }}
    {{- with $values.podLabels }}{{ toYaml . | nindent 4 }}{{ end }}
  annotations:
    kvferry/config-checksum: {{ printf "%s%s" (include "kvferry.config" .) (include "kvferry.hasStore" . | empty | ternary "" (include "kvferry.config" (dict "root" .root "role" "kvstore"))) | sha256sum }}
    kvferry/secret-checksum: {{ include "kvferry.secretChecksum" . }}
    {{- with $values.podAnnotations }}{{ toYaml . | nindent 4 }}{{ end }}
    {{- if include "kvferry.usesRdma" . }}
    {{- with .root.Values.rdma.podAnnotations }}{{ toYaml . | nindent 4 }}{{ end }}
    {{- end }}
spec:
  serviceAccountName: {{ include "kvferry.serviceAccount" .root | quote }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  {{- if include "kvferry.hasStore" . }}
  shareProcessNamespace: true   # worker and store map each other's memory by /proc, and notice each other's end
  {{- end }}
  terminationGracePeriodSeconds: {{ include "kvferry.graceSeconds" . }}
  securityContext:
    {{- include "kvferry.podSecurity" . | nindent 4 }}
  {{- with $values.resourceClaims }}
  resourceClaims:
    {{- range . }}
    - {{ omit . "request" | toJson }}
    {{- end }}
  {{- end }}
  {{- with .root.Values.imagePullSecrets }}
  imagePullSecrets:
    {{- range . }}
    - name: {{ . | quote }}
    {{- end }}
  {{- end }}
  {{- include "kvferry.placement" (dict "root" .root "role" .role "values" $values) | nindent 2 }}
  {{- with include "kvferry.initContainers" . }}
  initContainers:
    {{- . | nindent 4 }}
  {{- end }}
  containers:
    {{- if and (include "kvferry.isVllm" .) (or .headless (not (include "kvferry.hasAgent" .))) }}
    - {{- include "kvferry.vllmMain" . | nindent 6 }}
    {{- else }}
    - {{- include "kvferry.mainContainer" . | nindent 6 }}
    {{- end }}
  volumes:
    {{- include "kvferry.volumes" . | nindent 4 }}
{{- end -}}

{{- define "kvferry.placement" -}}
{{- with .values.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with .values.runtimeClassName }}
runtimeClassName: {{ . | quote }}
{{- end }}
{{- with .values.schedulerName }}
schedulerName: {{ . | quote }}
{{- end }}
{{- with .values.nodeSelector }}
nodeSelector: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .values.tolerations }}
tolerations: {{ toYaml . | nindent 2 }}
{{- end }}
{{- if and .root.Values.modelCache.singleNode (ne .role "kvstore") (not .values.affinity) }}
affinity:
  podAffinity:   # all pods mount one ReadWriteOnce claim
    requiredDuringSchedulingIgnoredDuringExecution:
      - topologyKey: kubernetes.io/hostname
        labelSelector:
          {{- include "kvferry.selectorOf" (dict "root" .root "roles" (without (include "kvferry.roles" .root | fromJsonArray) "kvstore")) | nindent 10 }}
{{- else if .values.affinity }}
affinity: {{ toYaml .values.affinity | nindent 2 }}
{{- else if has .role (list "prefill" "decode") }}
affinity:
  podAffinity:   # a block that stays in its zone is cheaper and sooner there
    preferredDuringSchedulingIgnoredDuringExecution:
      - weight: 50
        podAffinityTerm:
          topologyKey: topology.kubernetes.io/zone
          labelSelector:
            {{- include "kvferry.selectorOf" (dict "root" .root "roles" (list "prefill" "decode")) | nindent 12 }}
{{- end }}
topologySpreadConstraints:
  {{- if .values.topologySpreadConstraints }}
  {{- toYaml .values.topologySpreadConstraints | nindent 2 }}
  {{- else }}
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "kvferry.selector" . | nindent 8 }}
  {{- end }}
{{- end -}}

{{- define "kvferry.podSecurity" -}}
{{- $own := dig "podSecurityContext" dict (index .root.Values .role | default dict) -}}
{{- mergeOverwrite (deepCopy (default dict .root.Values.podSecurityContext)) (deepCopy $own) | toYaml -}}
{{- end -}}

{{- define "kvferry.containerSecurity" -}}
{{- $own := dig "securityContext" dict (index .root.Values .role | default dict) -}}
{{- mergeOverwrite (deepCopy (default dict .root.Values.securityContext)) (deepCopy $own) | toYaml -}}
{{- end -}}

{{- define "kvferry.mainContainer" -}}
{{- $root := .root -}}
{{- $values := index $root.Values .role -}}
{{- $isWorker := has .role (include "kvferry.workers" $root | fromJsonArray) -}}
name: {{ .role }}
image: {{ include "kvferry.image" (dict "image" $root.Values.image "default" $root.Chart.AppVersion) }}
imagePullPolicy: {{ $root.Values.image.pullPolicy }}
args:
  {{- include "kvferry.args" . | nindent 2 }}
env:
  {{- include "kvferry.env" . | nindent 2 }}
{{- with $values.envFrom }}
envFrom: {{ toYaml . | nindent 2 }}
{{- end }}
ports:
  {{- include "kvferry.containerPorts" . | nindent 2 }}
{{- include "kvferry.probes" . | nindent 0 }}
lifecycle:
  preStop:
    exec:
      {{- if $isWorker }}
      # Returns when the worker has left: nothing running, no block held for a reader.
      command: [kvferry, drain, --ops-port, {{ $root.Values.ports.ops | quote }}, --timeout, {{ add (include "kvferry.drainSeconds" .) 10 | quote }}]
      {{- else }}
      # SIGTERM begins the drain; before it, load balancers learn that this pod is going.
      command: [sleep, {{ ternary $root.Values.router.endpointDelaySeconds 2 (eq .role "router") | quote }}]
      {{- end }}
securityContext:
  {{- include "kvferry.containerSecurity" . | nindent 2 }}
resources:
  {{- if include "kvferry.hasAgent" . }}
  {{- toYaml $root.Values.vllm.agent.resources | nindent 2 }}
  {{- else }}
  {{- include "kvferry.resources" (dict "root" $root "values" $values "isRdma" (include "kvferry.usesRdma" .)) | nindent 2 }}
  {{- end }}
volumeMounts:
  {{- include "kvferry.mounts" . | nindent 2 }}
{{- end -}}

{{- define "kvferry.args" -}}
{{- $command := list .role -}}
{{- if eq .role "aggregated" -}}{{- $command = list "decode" "--aggregated" -}}{{- end -}}
{{- if include "kvferry.hasAgent" . -}}
{{- $command = list "agent" "--role" .role "--engine" (printf "http://127.0.0.1:%s" (include "kvferry.vllmPort" .)) -}}
{{- end -}}
{{- $command = concat $command (list "--config" "/etc/kvferry/config.yaml") -}}
{{- if has .role (list "encode" "prefill" "decode" "aggregated") -}}
{{- $command = concat $command (list "--engine-id" "$(POD_NAME)") -}}
{{- end -}}
{{- if include "kvferry.hasKvEvents" . -}}
{{- $address := include "kvferry.eventsAddress" . -}}
{{- $command = concat $command (list "--set" (printf "agent.kv_events_address=%s" $address) "--set" (printf "agent.kv_events_replay_address=%s-replay" $address)) -}}
{{- end -}}
{{- if and (include "kvferry.servesReaders" .) (not (include "kvferry.isVllm" .)) -}}
{{- $command = concat $command (list "--advertise-host" "$(POD_IP)") -}}
{{- end -}}
{{- toYaml $command -}}
{{- end -}}

{{- define "kvferry.env" -}}
{{- $values := .root.Values -}}
{{- $ucx := dict -}}
{{- if include "kvferry.movesBlocks" . -}}
{{- $_ := set $ucx "UCX_TCP_PORT_RANGE" (printf "%v-%v" $values.ports.ucx.first $values.ports.ucx.last) -}}
{{- if include "kvferry.usesRdma" . -}}
{{- with $values.rdma.netDevices -}}{{- $_ := set $ucx "UCX_NET_DEVICES" . -}}{{- end -}}
{{- with $values.rdma.tls -}}{{- $_ := set $ucx "UCX_TLS" . -}}{{- end -}}
{{- $ucx = merge (deepCopy (default dict $values.rdma.extraEnv)) $ucx -}}
{{- end -}}
{{- end -}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
- name: HF_HOME
  value: /var/cache/kvferry/huggingface
{{- if $values.modelCache.readOnly }}
- name: HF_HUB_OFFLINE
  value: "1"
{{- end }}
{{- include "kvferry.clusterKeyEnv" .root }}
{{- if and (eq .role "router") $values.security.apiKeys.existingSecret }}
- name: KVFERRY_API_KEY
  valueFrom: {secretKeyRef: {name: {{ $values.security.apiKeys.existingSecret | quote }}, key: {{ $values.security.apiKeys.key | quote }}}}
{{- end }}
{{- if eq .role "kvstore" }}
{{- include "kvferry.redisEnv" .root }}
{{- end }}
{{- with $values.modelCache.hfTokenSecret.name }}
- name: HF_TOKEN
  valueFrom: {secretKeyRef: {name: {{ . | quote }}, key: {{ $values.modelCache.hfTokenSecret.key | quote }}}}
{{- end }}
{{- range $name := keys $ucx | sortAlpha }}
- name: {{ $name }}
  value: {{ get $ucx $name | quote }}
{{- end }}
{{- with (index $values .role).extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "kvferry.containerPorts" -}}
{{- $ports := .root.Values.ports -}}
{{- if eq .role "router" }}
- {name: http, containerPort: {{ $ports.http }}}
- {name: workers, containerPort: {{ $ports.workers }}}
- {name: ops, containerPort: {{ $ports.ops }}}
{{- else if eq .role "kvstore" }}
- {name: store, containerPort: {{ $ports.store }}}
- {name: ops, containerPort: {{ $ports.ops }}}
{{- else }}
{{- if and (include "kvferry.servesReaders" .) (not (include "kvferry.isVllm" .)) }}
- {name: control, containerPort: {{ $ports.control }}}
- {name: data, containerPort: {{ $ports.data }}}
{{- end }}
- {name: ops, containerPort: {{ $ports.ops }}}
{{- end }}
{{- end -}}

{{/*
Start-up and liveness ask about this process alone; only readiness depends on others. A process that hangs has nothing to drain,
so its grace period is short.
*/}}
{{- define "kvferry.probes" -}}
{{- $given := default dict (index .root.Values .role).probes -}}
{{- $started := ternary "/started" "/health" (has .role (list "encode" "prefill" "decode" "aggregated")) -}}
{{- $defaults := dict
      "startup" (dict "path" $started "periodSeconds" 5 "failureThreshold" (include "kvferry.startTries" . | int) "terminationGracePeriodSeconds" 15)
      "readiness" (dict "path" "/ready" "periodSeconds" 2 "failureThreshold" 2)
      "liveness" (dict "path" "/health" "periodSeconds" 10 "timeoutSeconds" 5 "failureThreshold" 6 "terminationGracePeriodSeconds" 15) -}}
{{- range $name := list "startup" "readiness" "liveness" }}
{{- $probe := get $defaults $name }}
{{ $name }}Probe:
  httpGet: {path: {{ $probe.path }}, port: ops}
  {{- merge (deepCopy (default dict (get $given $name))) (omit $probe "path") | toYaml | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "kvferry.resources" -}}
{{- $resources := deepCopy (default dict .values.resources) -}}
{{- $extended := dict -}}
{{- with .values.gpu -}}
{{- if .count -}}{{- $_ := set $extended (default "nvidia.com/gpu" .resourceName) .count -}}{{- end -}}
{{- end -}}
{{- if .isRdma -}}
{{- $_ := set $extended .root.Values.rdma.resourceName .root.Values.rdma.count -}}
{{- end -}}
{{- $_ := set $resources "limits" (merge (default dict $resources.limits) $extended) -}}
{{- $_ := set $resources "requests" (merge (default dict $resources.requests) $extended) -}}
{{- with .values.resourceClaims -}}
{{- $claims := list -}}
{{- range . -}}{{- $claims = append $claims (pick . "name" "request") -}}{{- end -}}
{{- $_ := set $resources "claims" $claims -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{- define "kvferry.mounts" -}}
- {name: config, mountPath: /etc/kvferry, readOnly: true}
- {name: tmp, mountPath: /tmp}
- {name: shm, mountPath: /dev/shm}
{{- if ne .role "kvstore" }}
- {name: models, mountPath: /var/cache/kvferry{{ if .root.Values.modelCache.readOnly }}, readOnly: true{{ end }}}
{{- else if .root.Values.kvstore.disk.size }}
- {name: store, mountPath: /var/lib/kvferry}
{{- end }}
{{- if and (eq .role "router") .root.Values.security.tls.existingSecret }}
- {name: tls, mountPath: /etc/kvferry-tls, readOnly: true}
{{- end }}
{{- with (index .root.Values .role).extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "kvferry.volumes" -}}
{{- $values := .root.Values -}}
{{- $cache := $values.modelCache -}}
- name: config
  configMap: {name: {{ include "kvferry.roleName" . }}}
- name: tmp
  emptyDir: {sizeLimit: {{ ternary $values.vllm.tmpSize "1Gi" (eq (include "kvferry.isVllm" .) "true") }}}
{{- if include "kvferry.hasPlugin" . }}
- name: plugin
  emptyDir: {sizeLimit: 64Mi}
{{- end }}
{{- if and (eq .role "router") $values.security.tls.existingSecret }}
- name: tls
  secret: {secretName: {{ $values.security.tls.existingSecret | quote }}, defaultMode: 0440}
{{- end }}
- name: shm
  emptyDir: {medium: Memory, sizeLimit: {{ include "kvferry.shmSize" . }}}
{{- if ne .role "kvstore" }}
- name: models
  {{- if eq $cache.kind "emptyDir" }}
  emptyDir: {sizeLimit: {{ $cache.size }}}
  {{- else }}
  persistentVolumeClaim: {claimName: {{ include "kvferry.modelClaim" .root | quote }}{{ if $cache.readOnly }}, readOnly: true{{ end }}}
  {{- end }}
{{- end }}
{{- if and (include "kvferry.hasStore" .) $values.kvstore.disk.size }}
- name: store
  ephemeral:
    volumeClaimTemplate:
      spec:
        {{- include "kvferry.storeClaim" .root | nindent 8 }}
{{- end }}
{{- with (index $values .role).extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* /dev/shm: what UCX needs, and the pool of an LMCache server that shares memory with the worker by it. */}}
{{- define "kvferry.shmSize" -}}
{{- $base := include "kvferry.bytes" .root.Values.shm.size | int64 -}}
{{- if and (eq .root.Values.lmcache.mode "sidecar") (has .role (include "kvferry.kvWorkers" .root | fromJsonArray)) -}}
{{- $staging := dig "connector" "lmcache" "staging_bytes" 268435456 (include "kvferry.config" . | fromYaml) | int64 -}}
{{- add $base $staging (include "kvferry.bytes" .root.Values.lmcache.memory | int64) -}}
{{- else -}}
{{- .root.Values.shm.size -}}
{{- end -}}
{{- end -}}

{{- define "kvferry.initContainers" -}}
{{- $root := .root -}}
{{- $values := $root.Values -}}
{{- $config := include "kvferry.config" . | fromYaml -}}
{{- if include "kvferry.fetchesModel" . }}
- name: fetch-model
  image: {{ include "kvferry.image" (dict "image" $values.image "default" $root.Chart.AppVersion) }}
  imagePullPolicy: {{ $values.image.pullPolicy }}
  args: [models, {{ if eq .role "router" }}--no-weights, {{ end }}--config, /etc/kvferry/config.yaml, {{ $config.model.name | quote }}]
  env:
    - {name: HF_HOME, value: /var/cache/kvferry/huggingface}
    {{- with $values.modelCache.hfTokenSecret.name }}
    - name: HF_TOKEN
      valueFrom: {secretKeyRef: {name: {{ . | quote }}, key: {{ $values.modelCache.hfTokenSecret.key | quote }}}}
    {{- end }}
    {{- with (index $values .role).extraEnv }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with (index $values .role).envFrom }}
  envFrom: {{ toYaml . | nindent 4 }}
  {{- end }}
  securityContext:
    {{- include "kvferry.containerSecurity" . | nindent 4 }}
  resources:
    {{- toYaml (default dict (index $values .role).resources) | nindent 4 }}
  volumeMounts:
    {{- include "kvferry.mounts" . | nindent 4 }}
{{- end }}
{{- include "kvferry.sidecars" . }}
{{- if include "kvferry.isVllm" . }}
{{- include "kvferry.vllmInitContainers" . }}
{{- end }}
{{- end -}}
